"""Plato's container images, built without Docker and put onto the testbed's nodes.

Sources and Dockerfile → hash (`recipes`) → base from Debian packages (`base`) → buildah, into one OCI folder that all
images share (`build`) → each node gets the layers that it lacks (`nodes`). A hash that was built is not built again, a
node that has an image is not asked twice. What is kept lies in the cache, outside the checkout; `build.KEPT` bounds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from e2e.images.build import Store
from e2e.images.nodes import load, name_again
from e2e.images.recipes import DEVELOPMENT, SERVICES, Recipe, recipe
from e2e.testbed.layout import Layout

__all__ = ["DEVELOPMENT", "SERVICES", "TAG", "provide", "references", "retag"]

TAG = "0.1.0"


def references(tag: str = TAG, services: Iterable[str] = SERVICES) -> dict[str, str]:
    """{service: reference}; the development servers have tags of their own."""
    return {service: recipe(service).reference(tag) for service in services}


def provide(layout: Layout, tag: str = TAG, services: Iterable[str] = (*SERVICES, *DEVELOPMENT)) -> dict[str, str]:
    """Build what changed, put it onto every node of the running testbed under `tag`; {service: reference}.

    A second tag of the same sources costs one name per node. Raises TestbedError.
    """
    recipes: list[Recipe] = [recipe(service) for service in services]
    store = Store.of(layout)
    images = {each.reference(tag): store.provide(each) for each in recipes}
    load(layout, store, images)
    return {each.service: each.reference(tag) for each in recipes}


def retag(layout: Layout, tag: str, images: Mapping[str, str]) -> dict[str, str]:
    """Name what lies on the nodes once more, as a next version that builds nothing; {service: new reference}.

    `images` is what provide returned. The development servers keep their names. Raises TestbedError.
    """
    again = {service: recipe(service).reference(tag) for service in images}
    name_again(layout, {images[service]: new for service, new in again.items() if new != images[service]})
    return again

"""What every section of the settings is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Port = Annotated[int, Field(ge=1, le=65535)]


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)

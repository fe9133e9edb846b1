"""What every end-to-end test stands on: the cluster's API, Plato's dependencies, its operator, and a PlatoCluster.

kube.py          objects read by the API, everything else by kubectl and helm
dependencies.py  PostgreSQL and Valkey: on this machine for the testbed's pods, or those that are named
platform.py      the operator by its chart, one PlatoCluster, its gateways and rows, seen from outside
evidence.py      what a failed test leaves behind
"""

"""A real Kubernetes on one Linux machine, brought up from source and taken down whole.

What comes after what: `machine` says what is missing, `binaries` builds or finds the programs, `control` starts etcd,
the API server and its companions, `node` starts three nodes, `images` puts images on them, `teardown` ends it all and
says what is left. `layout` holds every path, name and address. Only the standard library is needed.
"""

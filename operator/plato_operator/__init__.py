"""The operator of Plato on Kubernetes: it watches the resources of plato.im and writes the record that processes read."""

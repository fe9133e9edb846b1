"""Names that users and machines see: types of resources, labels, ports. Standard library only."""

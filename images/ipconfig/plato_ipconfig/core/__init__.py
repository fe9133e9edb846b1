"""The pure core of ipconfig."""

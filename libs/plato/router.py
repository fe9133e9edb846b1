"""Routes of users' devices: read many, set by compare-and-set, end without deleting. Used by state and msg."""

"""The embedded cluster: one supervisor, real servers, one data folder."""

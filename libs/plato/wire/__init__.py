"""The wire: .proto files, their generated stubs, and what is encoded by hand for speed."""

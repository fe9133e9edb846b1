"""Real ends of the ports: PostgreSQL, Valkey, gRPC, files, JWT. Back ends' errors are translated here, once."""

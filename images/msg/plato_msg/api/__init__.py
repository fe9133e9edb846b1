"""The HTTP API of people and application servers: one module per noun, put together by `app`."""

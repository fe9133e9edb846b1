module plato-go-client

go 1.22

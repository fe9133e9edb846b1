// Command etcd is etcd's own server, built from the same module as the API server that talks to it.
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }

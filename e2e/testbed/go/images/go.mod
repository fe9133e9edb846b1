// The testbed's own images: static programs of the standard library, each alone in an image.
module plato.im/testbed/images

go 1.26.0

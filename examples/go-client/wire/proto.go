// Package wire holds the frames of docs/protocol.md: their fields, and just enough of protobuf (proto3) to write and
// read them. The few messages need two of its wire types, so a hand-written codec is shorter than a dependency.
package wire

import (
	"encoding/binary"
	"errors"
	"unicode/utf8"
)

// ErrMalformed says that bytes are no protobuf, or hold text that is not UTF-8.
var ErrMalformed = errors.New("wire: malformed frame")

// The wire types of protobuf. The frames use the first and the third; the other two are skipped where a later version of
// the platform sends a field that this client does not know.
const (
	varint = 0
	fixed8 = 1
	length = 2
	fixed4 = 5
)

// writer appends fields. What is zero or empty is left out, as proto3 does; put writes a message even if it is empty.
type writer struct{ b []byte }

func (w *writer) uint(no int, v uint64) {
	if v != 0 {
		w.b = binary.AppendUvarint(w.b, uint64(no)<<3|varint)
		w.b = binary.AppendUvarint(w.b, v)
	}
}

func (w *writer) put(no int, v []byte) {
	w.b = binary.AppendUvarint(w.b, uint64(no)<<3|length)
	w.b = binary.AppendUvarint(w.b, uint64(len(v)))
	w.b = append(w.b, v...)
}

func (w *writer) bytes(no int, v []byte) {
	if len(v) > 0 {
		w.put(no, v)
	}
}

func (w *writer) text(no int, v string) {
	w.bytes(no, []byte(v))
}

// field is one field as it was read: num of a varint, data of a length-delimited one.
type field struct {
	no   int
	num  uint64
	data []byte
}

func (f field) text() (string, error) {
	if !utf8.Valid(f.data) {
		return "", ErrMalformed
	}
	return string(f.data), nil
}

// each calls fn for every field of b in order. Fields of a wire type that no frame uses are skipped, not refused: both
// sides must ignore what they do not know.
func each(b []byte, fn func(field) error) error {
	for len(b) > 0 {
		key, n := binary.Uvarint(b)
		if n <= 0 || key>>3 == 0 || key>>3 > 1<<29-1 {
			return ErrMalformed
		}
		b = b[n:]
		f := field{no: int(key >> 3)}
		switch key & 7 {
		case varint:
			v, n := binary.Uvarint(b)
			if n <= 0 {
				return ErrMalformed
			}
			f.num, b = v, b[n:]
		case length:
			size, n := binary.Uvarint(b)
			if n <= 0 || size > uint64(len(b)-n) {
				return ErrMalformed
			}
			f.data, b = b[n:n+int(size)], b[n+int(size):]
		case fixed8, fixed4:
			size := 8
			if key&7 == fixed4 {
				size = 4
			}
			if len(b) < size {
				return ErrMalformed
			}
			b = b[size:]
			continue
		default:
			return ErrMalformed
		}
		if err := fn(f); err != nil {
			return err
		}
	}
	return nil
}

// into reads a message whose fields go to pointers by their number: most frames are no more than that.
type into struct {
	nums  map[int]*uint64
	texts map[int]*string
	raws  map[int]*[]byte
	subs  map[int]func([]byte) error
}

func (t into) read(b []byte) error {
	return each(b, func(f field) error {
		if p, ok := t.nums[f.no]; ok {
			*p = f.num
		} else if p, ok := t.texts[f.no]; ok {
			s, err := f.text()
			*p = s
			return err
		} else if p, ok := t.raws[f.no]; ok {
			*p = append([]byte(nil), f.data...)
		} else if fn, ok := t.subs[f.no]; ok {
			return fn(f.data)
		}
		return nil
	})
}

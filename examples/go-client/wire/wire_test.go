package wire

import (
	"encoding/hex"
	"os"
	"reflect"
	"strings"
	"testing"
)

const dialogue = "d:f_LZyNCkMEbVJwHRBGZW2iUkiDynF9mrmBwqGtF8Zew"

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// page gives the frame of docs/protocol.md §11 whose title begins so, in hex and without the length in front.
func page(t *testing.T, title string) string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text2, _ := strings.Cut(string(text), "\n"+title)
	lines := strings.Split(text2, "\n")[1:]
	var hex strings.Builder
	for _, line := range lines {
		if !strings.HasPrefix(line, "    ") {
			break
		}
		hex.WriteString(strings.TrimSpace(line))
	}
	if hex.Len() < 10 {
		t.Fatalf("the page has no frame %q", title)
	}
	return hex.String()[8:]
}

func TestClientFramesAreThoseOfThePage(t *testing.T) {
	id := unhex(t, "101112131415161718191a1b1c1d1e1f")
	for title, c := range map[string]struct {
		typ     Type
		payload []byte
	}{
		"> LOGIN":     {LOGIN, Login{Device: 123, Token: "eyJ…"}.Encode()},
		"> SYNC":      {SYNC, Sync{Ref: 1}.Encode()},
		"> UP":        {UP, Up{ClientID: 1, Conversation: dialogue, Body: []byte("hi"), ClientMsgID: id, To: "bob"}.Encode()},
		"> ACK":       {ACK, EncodeStored(7, 2)},
		"> HEARTBEAT": {HEARTBEAT, Heartbeat{Run: 7, PushNo: 2}.Encode()},
	} {
		if got := hex.EncodeToString(Cmd{Type: c.typ, Payload: c.payload}.Encode()); got != page(t, title) {
			t.Errorf("%s: %s, want %s", title, got, page(t, title))
		}
	}
}

func TestPlatformFramesAreReadAsThePageSays(t *testing.T) {
	id := unhex(t, "101112131415161718191a1b1c1d1e1f")
	cmd := func(title string) Cmd {
		c, err := DecodeCmd(unhex(t, page(t, title)))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	ack, err := DecodeAck(cmd("< ACK of the LOGIN").Payload)
	if err != nil || ack.ConnID == 0 || ack.User != "alice" || ack.HeartbeatMS != 30_000 || ack.ResumeMS != 300_000 ||
		ack.DelayMS != 1_000 || ack.RepeatMinMS != 2_000 || ack.RepeatMaxMS != 30_000 || ack.MaxBodyBytes != 63_488 ||
		hex.EncodeToString(ack.Secret) != "000102030405060708090a0b0c0d0e0f" {
		t.Errorf("login: %+v %v", ack, err)
	}
	c := cmd("< RECEIPT")
	receipt, err := DecodeReceipt(c.Payload)
	if err != nil || c.Run != 7 || c.PushNo != 1 || !reflect.DeepEqual(receipt,
		Receipt{Conversation: dialogue, ClientMsgID: id, ClientID: 1, MsgID: 42, Seq: 1}) {
		t.Errorf("receipt: %+v %+v %v", c, receipt, err)
	}
	c = cmd("< PUSH")
	row, err := DecodeRow(c.Payload)
	if err != nil || c.Type != PUSH || c.PushNo != 2 || !reflect.DeepEqual(row, Row{MsgID: 43, Conversation: dialogue,
		Seq: 2, PrevSeq: 1, From: "bob", Body: []byte("yo"), ClientMsgID: unhex(t, "202122232425262728292a2b2c2d2e2f")}) {
		t.Errorf("push: %+v %+v %v", c, row, err)
	}
}

func TestUnknownFieldsAreIgnoredAndBrokenOnesRefused(t *testing.T) {
	// Field 99 in each of the four wire types, then field 1 = 5.
	known := unhex(t, "980607"+"9906"+"0000000000000000"+"9a0601ff"+"9d0600000000"+"0805")
	if c, err := DecodeCmd(known); err != nil || c.Type != PUSH {
		t.Errorf("%+v %v", c, err)
	}
	for _, broken := range []string{"08", "0a05aa", "0b", "00", "0dff"} {
		if _, err := DecodeCmd(unhex(t, broken)); err == nil {
			t.Errorf("%s was read", broken)
		}
	}
	if _, err := DecodeAck(unhex(t, "1201ff")); err == nil {
		t.Error("text that is not UTF-8 was read")
	}
}

func TestACodeOfALaterVersionIsTreatedByItsRange(t *testing.T) {
	for code, act := range map[Code]Act{99: Fine, 199: Retry, 299: Reconnect, 399: LogIn, 419: Stop, 499: StopRequest, 500: Stop} {
		if code.Act() != act {
			t.Errorf("%d: %v", code, code.Act())
		}
	}
}

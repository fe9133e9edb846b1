package wire

// Type is a frame's type, docs/protocol.md §3.
type Type uint64

const (
	LOGIN     Type = 0
	HEARTBEAT Type = 1
	RECONN    Type = 2
	ACK       Type = 3
	UP        Type = 4
	PUSH      Type = 5
	SYNC      Type = 6
	SYNCED    Type = 7
	PULL      Type = 8
	PULLED    Type = 9
	NOTIFY    Type = 10
	RECEIPT   Type = 11
	REDIRECT  Type = 13
	KICK      Type = 14
	LOGOUT    Type = 15
	ERROR     Type = 16
)

// Cmd is MsgCmd, every frame.
type Cmd struct {
	Type    Type
	Payload []byte
	Run     uint64
	PushNo  uint64
}

// Encode of a client's frame: it never numbers one.
func (c Cmd) Encode() []byte {
	var w writer
	w.uint(1, uint64(c.Type))
	w.bytes(2, c.Payload)
	return w.b
}

// DecodeCmd reads one frame's payload.
func DecodeCmd(b []byte) (c Cmd, err error) {
	var typ uint64
	err = into{
		nums: map[int]*uint64{1: &typ, 3: &c.Run, 4: &c.PushNo},
		raws: map[int]*[]byte{2: &c.Payload},
	}.read(b)
	c.Type = Type(typ)
	return c, err
}

// Login is LoginMsg.
type Login struct {
	Device                            uint64
	Token, Platform, Network, Version string
}

func (m Login) Encode() []byte {
	var head, w writer
	head.uint(1, m.Device)
	w.put(1, head.b)
	w.text(3, m.Token)
	w.text(4, m.Platform)
	w.text(5, m.Network)
	w.text(6, m.Version)
	return w.b
}

// Heartbeat is HeartbeatMsg: stored up to (Run, PushNo).
type Heartbeat struct{ Run, PushNo uint64 }

func (m Heartbeat) Encode() []byte {
	var w writer
	w.put(1, nil)
	w.uint(3, m.Run)
	w.uint(4, m.PushNo)
	return w.b
}

// ReConn is ReConnMsg.
type ReConn struct {
	ConnID uint64
	Secret []byte
}

func (m ReConn) Encode() []byte {
	var head, w writer
	head.uint(1, m.ConnID)
	w.put(1, head.b)
	w.bytes(3, m.Secret)
	return w.b
}

// Ack is ACKMsg. The times are in milliseconds.
type Ack struct {
	Code                                   Code
	Msg                                    string
	Type                                   Type
	ConnID, ClientID                       uint64
	Conversation                           string
	Expected                               uint64
	ClientMsgID                            []byte
	Ref, Run, PushNo                       uint64
	Secret                                 []byte
	HeartbeatMS, ResumeMS, DelayMS         uint64
	RepeatMinMS, RepeatMaxMS, MaxBodyBytes uint64
	User                                   string
	ConnectDelayMS, ConnectTimeoutMS       uint64
	RetryMS                                uint64
}

// EncodeStored is the one ACK that a client sends: everything up to these numbers is stored.
func EncodeStored(run, pushNo uint64) []byte {
	var w writer
	w.uint(3, uint64(PUSH))
	w.uint(12, run)
	w.uint(13, pushNo)
	return w.b
}

// DecodeAck reads an ACKMsg.
func DecodeAck(b []byte) (m Ack, err error) {
	var code, typ uint64
	err = into{
		nums: map[int]*uint64{1: &code, 3: &typ, 4: &m.ConnID, 5: &m.ClientID, 9: &m.Expected, 11: &m.Ref, 12: &m.Run,
			13: &m.PushNo, 15: &m.HeartbeatMS, 16: &m.ResumeMS, 17: &m.DelayMS, 18: &m.RepeatMinMS, 19: &m.RepeatMaxMS,
			20: &m.MaxBodyBytes, 24: &m.ConnectDelayMS, 25: &m.ConnectTimeoutMS, 26: &m.RetryMS},
		texts: map[int]*string{2: &m.Msg, 8: &m.Conversation, 21: &m.User},
		raws:  map[int]*[]byte{10: &m.ClientMsgID, 14: &m.Secret},
	}.read(b)
	m.Code, m.Type = Code(code), Type(typ)
	return m, err
}

// Up is UPMsg.
type Up struct {
	ClientID, Acked uint64
	Conversation    string
	ClientMsgID     []byte
	To              string
	Body            []byte
}

func (m Up) Encode() []byte {
	var head, w writer
	head.uint(1, m.ClientID)
	head.text(3, m.Conversation)
	w.put(1, head.b)
	w.bytes(2, m.Body)
	w.uint(3, m.Acked)
	w.bytes(4, m.ClientMsgID)
	w.text(5, m.To)
	return w.b
}

// Row is PushMsg: one message of a conversation. The names are those of the client's journal, too.
type Row struct {
	MsgID        uint64
	Conversation string
	Seq, PrevSeq uint64
	From         string
	ClientMsgID  []byte
	Body         []byte
	AtMS         uint64
	MsgType      uint64
}

// DecodeRow reads a PushMsg.
func DecodeRow(b []byte) (m Row, err error) {
	err = into{
		nums:  map[int]*uint64{1: &m.MsgID, 5: &m.Seq, 6: &m.PrevSeq, 8: &m.MsgType, 10: &m.AtMS},
		texts: map[int]*string{4: &m.Conversation, 7: &m.From},
		raws:  map[int]*[]byte{3: &m.Body, 9: &m.ClientMsgID},
	}.read(b)
	return m, err
}

// Receipt is ReceiptMsg: the outcome of an UP.
type Receipt struct {
	Code                              Code
	Msg, Conversation                 string
	ClientMsgID                       []byte
	ClientID, MsgID, Seq, PrevSeq, At uint64
}

// DecodeReceipt reads a ReceiptMsg.
func DecodeReceipt(b []byte) (m Receipt, err error) {
	var code uint64
	err = into{
		nums:  map[int]*uint64{1: &code, 5: &m.ClientID, 6: &m.MsgID, 7: &m.Seq, 8: &m.PrevSeq, 9: &m.At},
		texts: map[int]*string{2: &m.Msg, 3: &m.Conversation},
		raws:  map[int]*[]byte{4: &m.ClientMsgID},
	}.read(b)
	m.Code = Code(code)
	return m, err
}

// Cursor names a place in a conversation.
type Cursor struct {
	Conversation string
	Seq          uint64
}

// Sync is SyncMsg: what is newer than these cursors, in (After, Upto]?
type Sync struct {
	Ref         uint64
	After, Upto string
	Cursors     []Cursor
}

func (m Sync) Encode() []byte {
	var w writer
	w.uint(1, m.Ref)
	w.text(2, m.After)
	w.text(3, m.Upto)
	for _, c := range m.Cursors {
		var sub writer
		sub.text(1, c.Conversation)
		sub.uint(2, c.Seq)
		w.put(4, sub.b)
	}
	return w.b
}

// Item is SyncedItem.
type Item struct {
	Conversation  string
	Newest, First uint64
	Peer          string
}

// Synced is SyncedMsg.
type Synced struct {
	Ref     uint64
	Code    Code
	Msg     string
	Items   []Item
	More    bool
	Covered string
	RetryMS uint64
}

// DecodeSynced reads a SyncedMsg.
func DecodeSynced(b []byte) (m Synced, err error) {
	var code, more uint64
	err = into{
		nums:  map[int]*uint64{1: &m.Ref, 2: &code, 5: &more, 7: &m.RetryMS},
		texts: map[int]*string{3: &m.Msg, 6: &m.Covered},
		subs: map[int]func([]byte) error{4: func(b []byte) error {
			var it Item
			err := into{
				nums:  map[int]*uint64{2: &it.Newest, 3: &it.First},
				texts: map[int]*string{1: &it.Conversation, 4: &it.Peer},
			}.read(b)
			m.Items = append(m.Items, it)
			return err
		}},
	}.read(b)
	m.Code, m.More = Code(code), more != 0
	return m, err
}

// Pull is PullMsg from one seq up to the newest.
type Pull struct {
	Ref          uint64
	Conversation string
	From         uint64
}

func (m Pull) Encode() []byte {
	var w writer
	w.uint(1, m.Ref)
	w.text(2, m.Conversation)
	w.uint(3, m.From)
	return w.b
}

// Pulled is PulledMsg.
type Pulled struct {
	Ref                            uint64
	Code                           Code
	Msg, Conversation              string
	Rows                           []Row
	CoveredFrom, CoveredTo, Newest uint64
	RetryMS                        uint64
}

// DecodePulled reads a PulledMsg.
func DecodePulled(b []byte) (m Pulled, err error) {
	var code uint64
	err = into{
		nums:  map[int]*uint64{1: &m.Ref, 2: &code, 6: &m.CoveredFrom, 7: &m.CoveredTo, 8: &m.Newest, 9: &m.RetryMS},
		texts: map[int]*string{3: &m.Msg, 4: &m.Conversation},
		subs: map[int]func([]byte) error{5: func(b []byte) error {
			row, err := DecodeRow(b)
			m.Rows = append(m.Rows, row)
			return err
		}},
	}.read(b)
	m.Code = Code(code)
	return m, err
}

// DecodeNotify reads a NotifyMsg.
func DecodeNotify(b []byte) (newest []Cursor, err error) {
	err = into{subs: map[int]func([]byte) error{1: func(b []byte) error {
		var c Cursor
		err := into{nums: map[int]*uint64{2: &c.Seq}, texts: map[int]*string{1: &c.Conversation}}.read(b)
		newest = append(newest, c)
		return err
	}}}.read(b)
	return newest, err
}

// Gateway is where to connect; the JSON names are those of ipconfig's list.
type Gateway struct {
	Name string `json:"name"`
	IP   string `json:"ip"`
	Port uint64 `json:"port"`
}

// DecodeRedirect reads a RedirectMsg.
func DecodeRedirect(b []byte) (to []Gateway, err error) {
	err = into{subs: map[int]func([]byte) error{1: func(b []byte) error {
		var g Gateway
		err := into{nums: map[int]*uint64{3: &g.Port}, texts: map[int]*string{1: &g.Name, 2: &g.IP}}.read(b)
		to = append(to, g)
		return err
	}}}.read(b)
	return to, err
}

// DecodeKick reads a KickMsg.
func DecodeKick(b []byte) (*Refusal, error) {
	var code uint64
	var r Refusal
	err := into{nums: map[int]*uint64{1: &code}, texts: map[int]*string{2: &r.Msg}}.read(b)
	r.Code = Code(code)
	return &r, err
}

// Error is ErrorMsg.
type Error struct {
	Refusal
	Type Type
	Ref  uint64
}

// DecodeError reads an ErrorMsg.
func DecodeError(b []byte) (m Error, err error) {
	var code, typ uint64
	err = into{
		nums:  map[int]*uint64{1: &code, 3: &typ, 4: &m.Ref, 5: &m.RetryMS},
		texts: map[int]*string{2: &m.Msg},
	}.read(b)
	m.Code, m.Type = Code(code), Type(typ)
	return m, err
}

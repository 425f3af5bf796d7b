package queue

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/tierq/tierq/queue/code"
)

var rewriteGolden = flag.Bool("rewrite-golden", false, "write testdata/golden anew; then read the diff: it is a format change")

// golden compares bytes with testdata/golden/NAME.txt, which holds them in hex, 32 a line, under a line that says what
// they encode.
func golden(t *testing.T, name, what string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", "golden", name+".txt")
	text := "# " + what + "\n"
	for b := got; len(b) > 0; b = b[min(32, len(b)):] {
		text += hex.EncodeToString(b[:min(32, len(b))]) + "\n"
	}
	if *rewriteGolden {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err, "run with -rewrite-golden to write it")
	require.Equal(t, string(want), text, "the format has changed: old data and other versions cannot be read any more")
}

func fullConfig() GroupConfig {
	return GroupConfig{
		LeaseMs: 45_000, MaxAttempts: 7, BackoffBaseMs: 500, BackoffFactorPermille: 1_500, BackoffCapMs: 60_000,
		JitterPermille: 250, DelaysMs: []uint64{1000, 5000, 0}, MaxInFlight: 100, MaxInFlightPerConsumer: 10,
		RecordAfterMs: 2_000, SingleActiveConsumer: true, Paused: true, DeadLetterQueue: "orders.dead",
	}
}

func fullOptions() QueueOptions {
	return QueueOptions{
		Version: 3, Ordering: OrderKey, StrictSequence: true, Overflow: OverflowDropOldest, Durability: DurabilityStrict,
		Mode: ModeLog, Paused: true, MaxBodyBytes: 2 << 20, MaxBytes: 1 << 30, MaxMessages: 1_000_000, TTLMs: Day,
		MaxDelayMs: Hour, RetainMs: 7 * Day, RetainBytes: 1 << 29, RetainMessages: 500_000, DedupMs: 60_000,
		Partition: 2, Partitions: 4,
	}
}

func defaultConfig() GroupConfig {
	var c GroupConfig
	c.EnsureDefaults()
	return c
}

func defaultOptions() QueueOptions {
	var o QueueOptions
	o.EnsureDefaults()
	return o
}

// variants is one command of every variant: what its golden bytes pin.
func variants() map[string]Command {
	const at = Stamp(1_764_457_200_123)
	options := fullOptions()
	return map[string]Command{
		"enqueue_plain": &Enqueue{Stamp: at, Publishes: []Publish{{Messages: []Message{{Body: []byte("hello")}}}}},
		"enqueue_full": &Enqueue{Stamp: at, Publishes: []Publish{
			{
				Producer: Producer{Kind: ProducerClient, ID: 0xfeedfacecafebeef}, ProducerEpoch: 4, Low: 17,
				Contiguous: true, Atomic: true, CheckLast: true, ExpectedLast: 99,
				Messages: []Message{
					{Seq: 20, DedupID: []byte("d-1"), Key: []byte("k"), VisibleAt: at + 5000, ExpiresAt: at + 90_000,
						Headers: []Header{{Name: "a", Value: []byte{1, 2}}, {Name: "a"}}, Body: []byte("first")},
					{Seq: 21},
				},
			},
			{Producer: Producer{Kind: ProducerOutbox, ID: 12, Sub: 3}, Messages: []Message{{Seq: 1, Body: []byte("dead")}}},
		}},
		"ack":             &Ack{Stamp: at, Group: 5, Epoch: 1<<32 + 7, Ranges: []AddressRange{{1, 1}, {300, 400}}},
		"group_create":    &Group{Stamp: at, Op: GroupCreate, OperationID: 77, Name: "billing", Start: Start{Kind: StartAddress, At: 1000}, Config: fullConfig(), FirstHome: 2},
		"group_default":   &Group{Stamp: at, Op: GroupCreate, OperationID: 78, Name: DefaultGroup, Config: defaultConfig(), FirstHome: 1},
		"group_delete":    &Group{Stamp: at, Op: GroupDelete, OperationID: 79, ID: 5, ExpectedEpoch: 3},
		"group_reset":     &Group{Stamp: at, Op: GroupReset, OperationID: 80, ID: 5, ExpectedEpoch: 3, Start: Start{Kind: StartTime, At: uint64(at)}},
		"group_configure": &Group{Stamp: at, Op: GroupConfigure, ID: 5, ExpectedVersion: 2, Config: defaultConfig()},
		"expire": &Expire{Stamp: at, Group: 5, Epoch: 9, Entries: []ExpireEntry{
			{Kind: ExpireUpdate, Address: 10, Change: 0, Attempts: 1, NotBefore: at + 1000, Reason: "nack: no stock"},
			{Kind: ExpireDead, Address: 11, Change: 4, Attempts: 5, Reason: "lease ran out"},
			{Kind: ExpireLease, Address: 12, Change: 1, Attempts: 1, Lease: LeaseName{Epoch: 9, Number: 1234}, Deadline: at + 30_000, Consumer: "worker-1"},
			{Kind: ExpireRelease, Address: 12, Change: 2},
			{Kind: ExpireClaim, Address: 13, Change: 2},
			{Kind: ExpireRedrive, Address: 11, Change: 5},
			{Kind: ExpireExport, Address: 14, Change: 6, ExportState: ExportExporting, Target: 900},
			{Kind: ExpireExport, Address: 14, Change: 7, ExportState: ExportDone, Target: 900},
		}},
		"home":            &Home{Stamp: at, Group: 5, ExpectedHome: 2, ExpectedEpoch: 9, NewHome: 3, Released: true},
		"retention_empty": &Retention{Stamp: at},
		"retention_full": &Retention{Stamp: at, OperationID: 81, ReclaimLine: 500, Reclaim: []Address{501, 503}, DropTo: 510,
			PurgeTo: 520, Park: []Address{530}, Delayed: []DelayedChange{{540, at, 0}, {541, at, at + 1}}, Options: &options,
			Retire: true, FormatLevel: 2, CheckpointID: 0xabcdef},
		"retention_forget": &Retention{Stamp: at, Forget: []Producer{{Kind: ProducerOutbox, ID: 11, Sub: 2}, {Kind: ProducerOutbox, ID: 300, Sub: 1 << 40}}},
		"retention_import": &Retention{Stamp: at, Import: &Import{ID: 0xfeed, Chunk: 3, Pairs: importedPairs()}},
		"retention_imported": &Retention{Stamp: at, Import: &Import{ID: 0xfeed, Chunk: 4,
			Meta: (&metaValue{Meta: Meta{Applied: 9, Last: 7, FormatLevel: 3, Options: initialOptions}, nextGroup: 2}).encode(nil), Keys: 2, Bytes: 33}},
		"retention_recover": &Retention{Stamp: at, Recover: &Recovery{Expected: 1 << 40}},
		"stamp_max":         &Home{Stamp: MaxStamp, Group: math.MaxUint64, ExpectedHome: math.MaxUint64, ExpectedEpoch: math.MaxUint64, NewHome: math.MaxUint64},
	}
}

func importedPairs() []byte {
	b := AppendPair(nil, appendKey1(nil, kindCount, 1), (&countValue{messages: 1, bytes: 5}).encode(nil))
	return AppendPair(b, appendKey2(nil, kindExport, 1, 255), encodeExport(nil, 7))
}

func results() map[string]Result {
	return map[string]Result{
		"zero":    {},
		"refused": {Code: code.StaleOwner, Index: 12, Clock: 1_764_457_200_123, Epoch: 8, Home: 3},
		"enqueue": {Code: code.OK, Index: 1 << 40, Clock: 1_764_457_200_123, Publishes: []PublishResult{
			{Code: code.OK, Last: 102, Messages: []MessageResult{{Code: code.OK, Address: 101}, {Code: code.OK, Address: 7, Duplicate: true}, {Code: code.QueueFull}}},
			{Code: code.SeqGap, Last: 102},
		}},
		"ack":       {Code: code.OK, Index: 13, Clock: 1, Acks: []AckState{AckUnknown, AckDone, AckAlready, AckDead}},
		"expire":    {Code: code.OK, Index: 14, Clock: 1, Expires: []ExpireResult{{}, {Applied: true, Change: 3, Round: 1, Attempts: 2}, {Finished: true, Change: 4}, {Applied: true, Dead: true, Change: 5, Attempts: 5}}},
		"group":     {Code: code.OK, Index: 15, Clock: 1, Group: 6, Epoch: 1, Home: 2, Version: 1},
		"retention": {Code: code.OK, Index: 16, Clock: 1, Delayed: []code.Code{code.OK, code.UnknownMessage}, Version: 4},
	}
}

func TestCommandGolden(t *testing.T) {
	for name, c := range variants() {
		t.Run(name, func(t *testing.T) {
			b, err := EncodeCommand(nil, c)
			require.NoError(t, err)
			golden(t, "command_"+name, fmt.Sprintf("%T", c), b)
			got, err := DecodeCommand(b)
			require.NoError(t, err)
			require.Equal(t, c, got)
			require.Equal(t, c.CommandStamp(), got.CommandStamp())
			refusesEveryCut(t, b, func(b []byte) error { _, err := DecodeCommand(b); return err })
		})
	}
}

func TestResultGolden(t *testing.T) {
	for name, r := range results() {
		t.Run(name, func(t *testing.T) {
			b := EncodeResult(nil, &r)
			golden(t, "result_"+name, "Result", b)
			got, err := DecodeResult(b)
			require.NoError(t, err)
			require.Equal(t, r, got)
			refusesEveryCut(t, b, func(b []byte) error { _, err := DecodeResult(b); return err })
		})
	}
}

func TestConfigGolden(t *testing.T) {
	for name, c := range map[string]GroupConfig{"zero": {}, "default": defaultConfig(), "full": fullConfig()} {
		b := AppendGroupConfig(nil, c)
		golden(t, "groupconfig_"+name, "GroupConfig", b)
		got, err := DecodeGroupConfig(b)
		require.NoError(t, err)
		require.Equal(t, c, got)
		refusesEveryCut(t, b, func(b []byte) error { _, err := DecodeGroupConfig(b); return err })
	}
	for name, o := range map[string]QueueOptions{"zero": {}, "default": defaultOptions(), "full": fullOptions()} {
		b := AppendQueueOptions(nil, o)
		golden(t, "queueoptions_"+name, "QueueOptions", b)
		got, err := DecodeQueueOptions(b)
		require.NoError(t, err)
		require.Equal(t, o, got)
		refusesEveryCut(t, b, func(b []byte) error { _, err := DecodeQueueOptions(b); return err })
	}
}

// refusesEveryCut: no prefix of an encoding, and nothing longer, is one.
func refusesEveryCut(t *testing.T, b []byte, decode func([]byte) error) {
	t.Helper()
	for n := range b {
		require.ErrorIs(t, decode(b[:n:n]), ErrFormat, "cut to %d of %d bytes", n, len(b))
	}
	require.ErrorIs(t, decode(append(bytes.Clone(b), 0)), ErrFormat, "one byte too many")
}

func TestDecodeCommandRefuses(t *testing.T) {
	head := []byte{commandVersion, tagEnqueue, 0}
	for _, c := range []struct {
		what string
		b    []byte
		text string
	}{
		{"nothing", nil, "ends early"},
		{"a newer version", []byte{2, tagAck, 0}, "command version 2: this binary reads version 1"},
		{"version 0", []byte{0, tagAck, 0}, "command version 0"},
		{"tag 0", []byte{1, 0, 0}, "tag 0 is unknown"},
		{"tag 7", []byte{1, 7, 0}, "tag 7 is unknown"},
		{"a number in a longer form", []byte{1, tagHome, 0x80, 0}, "shortest form"},
		{"a number of more than 64 bits", append([]byte{1, tagHome}, bytes.Repeat([]byte{0xff}, 11)...), "shortest form"},
		{"a stamp above 2^48", []byte{1, tagHome, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, "is above 281474976710655"},
		{"more publishes than bytes", append(head, 100), "100 items cannot be in 0 bytes"},
		{"too many publishes", append(head, 0xff, 0xff, 3), "65535 is above 10000"},
		{"producer kind 3", append(head, 1, 3, 0, 0, 0, 0, 0, 0, 0, 0), "producer kind 3 is unknown"},
		{"publish flag 8", append(head, 1, 0, 0, 0, 0, 0, 8, 0, 0), "publish flags 8 is unknown"},
		{"a boolean of 2", []byte{1, tagHome, 0, 1, 0, 0, 1, 2}, "2 is no boolean"},
		{"expire kind 8", append([]byte{1, tagExpire, 0, 1, 0, 1, 8}, make([]byte, 11)...), "expire kind 8 is unknown"},
		{"group op 5", []byte{1, tagGroup, 0, 5}, "group op 5 is unknown"},
		{"too many ranges", append([]byte{1, tagAck, 0, 1, 1, 0x81, 8}, make([]byte, 3000)...), "1025 is above 1024"},
	} {
		_, err := DecodeCommand(c.b)
		require.ErrorIs(t, err, ErrFormat, c.what)
		require.ErrorContains(t, err, c.text, c.what)
	}
}

func TestDecodedBodiesAreNotCopied(t *testing.T) {
	b, err := EncodeCommand(nil, &Enqueue{Publishes: []Publish{{Messages: []Message{{Key: []byte("key"), Body: []byte("body")}}}}})
	require.NoError(t, err)
	c, err := DecodeCommand(b)
	require.NoError(t, err)
	m := &c.(*Enqueue).Publishes[0].Messages[0]
	b[len(b)-1] = 'Y'
	require.Equal(t, "bodY", string(m.Body))
	require.Equal(t, 4, cap(m.Body), "an append must not run into what follows")
	require.Equal(t, 3, cap(m.Key))
}

func TestDecodeAllocatesNoMoreThanTheInputJustifies(t *testing.T) {
	lies := []byte{commandVersion, tagEnqueue, 0, 0x90, 0x4e} // 10,000 publishes, and then nothing
	n := testing.AllocsPerRun(100, func() { _, _ = DecodeCommand(lies) })
	require.LessOrEqual(t, n, 12.0)
}

func genCommand() *rapid.Generator[Command] {
	return rapid.Custom(func(t *rapid.T) Command {
		stamp := Stamp(rapid.Uint64Max(uint64(MaxStamp)).Draw(t, "stamp"))
		u := func(name string) uint64 { return rapid.Uint64().Draw(t, name) }
		address := func(name string) Address { return Address(rapid.Uint64Range(1, uint64(MaxAddress)).Draw(t, name)) }
		bytesOf := func(name string, n int) []byte {
			b := rapid.SliceOfN(rapid.Byte(), 0, n).Draw(t, name)
			if len(b) == 0 {
				return nil
			}
			return b
		}
		switch rapid.IntRange(1, 6).Draw(t, "tag") {
		case tagEnqueue:
			return &Enqueue{Stamp: stamp, Publishes: rapid.SliceOfN(genPublish(), 1, 4).Draw(t, "publishes")}
		case tagAck:
			c := &Ack{Stamp: stamp, Group: GroupID(u("group") | 1), Epoch: Epoch(u("epoch"))}
			for range rapid.IntRange(1, 10).Draw(t, "ranges") {
				first := Address(rapid.Uint64Range(1, uint64(MaxAddress)-100).Draw(t, "first"))
				c.Ranges = append(c.Ranges, AddressRange{first, first + Address(rapid.IntRange(0, 99).Draw(t, "more"))})
			}
			return c
		case tagGroup:
			op := GroupOp(rapid.IntRange(1, 4).Draw(t, "op"))
			return &Group{Stamp: stamp, Op: op, OperationID: u("operation") | 1, Name: "g" + rapid.StringMatching(`[A-Za-z0-9._-]{0,79}`).Draw(t, "name"),
				ID: GroupID(u("id") | 1), ExpectedEpoch: Epoch(u("epoch")), ExpectedVersion: u("version"),
				Start:     Start{Kind: StartAddress, At: uint64(address("start"))},
				Config:    rapid.SampledFrom([]GroupConfig{defaultConfig(), fullConfig()}).Draw(t, "config"),
				FirstHome: ReplicaID(u("home"))}
		case tagExpire:
			c := &Expire{Stamp: stamp, Group: GroupID(u("group") | 1), Epoch: Epoch(u("epoch"))}
			for range rapid.IntRange(1, 10).Draw(t, "entries") {
				c.Entries = append(c.Entries, ExpireEntry{Kind: ExpireKind(rapid.IntRange(1, 7).Draw(t, "kind")), Address: address("address"),
					Change: Change(u("change")), Attempts: rapid.Uint32().Draw(t, "attempts"), NotBefore: stamp, Reason: string(bytesOf("reason", 255)),
					Lease: LeaseName{Epoch(u("lease epoch")), u("lease number")}, Deadline: stamp, Consumer: string(bytesOf("consumer", 80)),
					ExportState: ExportExporting, Target: u("target")})
			}
			return c
		case tagHome:
			return &Home{Stamp: stamp, Group: GroupID(u("group") | 1), ExpectedHome: ReplicaID(u("old")), ExpectedEpoch: Epoch(u("epoch")),
				NewHome: ReplicaID(u("new") | 1), Released: rapid.Bool().Draw(t, "released")}
		default:
			c := &Retention{Stamp: stamp, OperationID: u("operation"), ReclaimLine: address("line"), DropTo: address("drop"), PurgeTo: address("purge"),
				Retire: rapid.Bool().Draw(t, "retire"), FormatLevel: rapid.Uint32().Draw(t, "level"), CheckpointID: u("checkpoint")}
			for range rapid.IntRange(0, 5).Draw(t, "n") {
				c.Reclaim = append(c.Reclaim, address("reclaim"))
				c.Park = append(c.Park, address("park"))
				c.Delayed = append(c.Delayed, DelayedChange{address("delayed"), stamp, stamp})
				c.Forget = append(c.Forget, Producer{Kind: ProducerOutbox, ID: u("forget") | 1, Sub: u("forget group") | 1})
			}
			if rapid.Bool().Draw(t, "options") {
				o := fullOptions()
				c.Options = &o
			}
			return c
		}
	})
}

func genPublish() *rapid.Generator[Publish] {
	return rapid.Custom(func(t *rapid.T) Publish {
		p := Publish{Atomic: rapid.Bool().Draw(t, "atomic")}
		if rapid.Bool().Draw(t, "producer") {
			p.Producer = Producer{Kind: ProducerClient, ID: rapid.Uint64Min(1).Draw(t, "id")}
			p.ProducerEpoch, p.Low = rapid.Uint64().Draw(t, "epoch"), Seq(rapid.Uint64Max(uint64(MaxSeq)).Draw(t, "low"))
			p.Contiguous = rapid.Bool().Draw(t, "contiguous")
		}
		if rapid.Bool().Draw(t, "check") {
			p.CheckLast, p.ExpectedLast = true, Address(rapid.Uint64Max(uint64(MaxAddress)).Draw(t, "last"))
		}
		seq := Seq(rapid.Uint64Range(1, 1<<62).Draw(t, "seq"))
		for range rapid.IntRange(1, 5).Draw(t, "messages") {
			m := Message{VisibleAt: Stamp(rapid.Uint64Max(uint64(MaxStamp)).Draw(t, "visible")), Body: []byte("b" + rapid.String().Draw(t, "body"))}
			if p.Producer.Kind != ProducerNone {
				m.Seq = seq
				seq++
			}
			for range rapid.IntRange(0, 3).Draw(t, "headers") {
				m.Headers = append(m.Headers, Header{Name: "n" + rapid.StringN(0, 9, 40).Draw(t, "name"), Value: []byte{rapid.Byte().Draw(t, "value")}})
			}
			p.Messages = append(p.Messages, m)
		}
		return p
	})
}

func TestCommandRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := genCommand().Draw(t, "command")
		before := []byte("kept")
		b, err := EncodeCommand(before, c)
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeCommand(b[len(before):])
		if err != nil {
			t.Fatal(err)
		}
		require.Equal(t, c, got)
	})
}

// FuzzDecodeCommand: the decoder never panics, and what it accepts is what the encoder writes.
func FuzzDecodeCommand(f *testing.F) {
	for _, c := range variants() {
		f.Add(appendCommand(nil, c))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeCommand(b)
		if err != nil {
			require.ErrorIs(t, err, ErrFormat)
			return
		}
		require.Equal(t, b, appendCommand(nil, c), "two encodings of one command")
		_ = Validate(c)
	})
}

func FuzzDecodeResult(f *testing.F) {
	for _, r := range results() {
		f.Add(EncodeResult(nil, &r))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := DecodeResult(b)
		if err == nil {
			require.Equal(t, b, EncodeResult(nil, &r))
		}
	})
}

func FuzzDecodeGroupConfig(f *testing.F) {
	f.Add(AppendGroupConfig(nil, fullConfig()))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := DecodeGroupConfig(b)
		if err == nil {
			require.Equal(t, b, AppendGroupConfig(nil, c))
		}
	})
}

func FuzzDecodeQueueOptions(f *testing.F) {
	f.Add(AppendQueueOptions(nil, fullOptions()))
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := DecodeQueueOptions(b)
		if err == nil {
			require.Equal(t, b, AppendQueueOptions(nil, o))
		}
	})
}

func BenchmarkEnqueueCodec(b *testing.B) {
	c := &Enqueue{Stamp: 1_764_457_200_123}
	for i := range 1000 {
		c.Publishes = append(c.Publishes, Publish{Producer: Producer{Kind: ProducerClient, ID: uint64(i)<<40 + 1}, Low: 1000,
			Messages: []Message{{Seq: 1001, Body: make([]byte, 256)}}})
	}
	encoded, err := EncodeCommand(nil, c)
	require.NoError(b, err)
	b.Run("encode", func(b *testing.B) {
		b.SetBytes(int64(len(encoded)))
		b.ReportAllocs()
		dst := make([]byte, 0, len(encoded))
		for b.Loop() {
			_, _ = EncodeCommand(dst, c)
		}
	})
	b.Run("decode", func(b *testing.B) {
		b.SetBytes(int64(len(encoded)))
		b.ReportAllocs()
		for b.Loop() {
			_, _ = DecodeCommand(encoded)
		}
	})
}

func TestValidate(t *testing.T) {
	big := func(n int) []byte { return make([]byte, n) }
	one := []Message{{Body: []byte("x")}}
	client := Producer{Kind: ProducerClient, ID: 1}
	publish := func(p Publish) Command { return &Enqueue{Publishes: []Publish{p}} }
	many := make([]Message, MaxBatchMessages+1)
	for _, c := range []struct {
		what string
		c    Command
		code code.Code
		text string
	}{
		{"no publish", &Enqueue{}, code.BatchEmpty, "Publishes"},
		{"no message", publish(Publish{}), code.BatchEmpty, "Publishes[0]: Messages"},
		{"too many messages", publish(Publish{Messages: many}), code.BatchTooLarge, "10001 messages"},
		{"too many over all", &Enqueue{Publishes: []Publish{{Messages: many[:6000]}, {Messages: many[:6000]}}}, code.BatchTooLarge, "12000 messages"},
		{"too many bytes", publish(Publish{Messages: []Message{{Body: big(1 << 20)}, {Body: big(1)}}}), code.BatchTooLarge, "1048577 message bytes"},
		{"one larger", publish(Publish{Messages: []Message{{Body: big(2 << 20)}}}), code.OK, ""},
		{"the largest", publish(Publish{Messages: []Message{{Body: big(MaxBodyBytesHard)}}}), code.OK, ""},
		{"too large", publish(Publish{Messages: []Message{{Body: big(MaxBodyBytesHard + 1)}}}), code.TooLarge, "Messages[0]: Body has 16776193 bytes"},
		{"key", publish(Publish{Messages: []Message{{Key: big(256)}}}), code.InvalidArgument, "Key has 256"},
		{"dedup id", publish(Publish{Messages: []Message{{DedupID: big(256)}}}), code.InvalidArgument, "DedupID has 256"},
		{"priority", publish(Publish{Messages: []Message{{Priority: 1}}}), code.InvalidArgument, "Priority"},
		{"headers", publish(Publish{Messages: []Message{{Headers: make([]Header, 65)}}}), code.InvalidArgument, "65 Headers"},
		{"header name", publish(Publish{Messages: []Message{{Headers: make([]Header, 1)}}}), code.InvalidArgument, "Headers[0].Name is empty"},
		{"header bytes", publish(Publish{Messages: []Message{{Headers: []Header{{"a", big(64 << 10)}}}}}), code.InvalidArgument, "65537 bytes"},
		{"visible at", publish(Publish{Messages: []Message{{VisibleAt: MaxStamp + 1}}}), code.InvalidArgument, "VisibleAt"},
		{"seq without producer", publish(Publish{Messages: []Message{{Seq: 1}}}), code.ProducerSeqInvalid, "without a producer"},
		{"seq 0", publish(Publish{Producer: client, Messages: one}), code.ProducerSeqInvalid, "Seq 0"},
		{"seqs fall", publish(Publish{Producer: client, Messages: []Message{{Seq: 2}, {Seq: 2}}}), code.ProducerSeqInvalid, "Messages[1]"},
		{"seq too high", publish(Publish{Producer: client, Messages: []Message{{Seq: MaxSeq + 1}}}), code.ProducerSeqInvalid, "Seq"},
		{"producer id 0", publish(Publish{Producer: Producer{Kind: ProducerClient}, Messages: one}), code.InvalidArgument, "Producer"},
		{"outbox sub 0", publish(Publish{Producer: Producer{Kind: ProducerOutbox, ID: 1}, Messages: one}), code.InvalidArgument, "Producer"},
		{"kind", publish(Publish{Producer: Producer{Kind: 9}, Messages: one}), code.InvalidArgument, "Producer.Kind 9"},
		{"low without producer", publish(Publish{Low: 1, Messages: one}), code.InvalidArgument, "Low"},
		{"expected last", publish(Publish{ExpectedLast: 1, Messages: one}), code.InvalidArgument, "ExpectedLast"},
		{"ack of nothing", &Ack{Group: 1}, code.BatchEmpty, "Ranges"},
		{"ack without group", &Ack{Ranges: []AddressRange{{1, 1}}}, code.InvalidArgument, "Group"},
		{"ack of 0", &Ack{Group: 1, Ranges: []AddressRange{{0, 1}}}, code.InvalidArgument, "Ranges[0]: First"},
		{"ack backwards", &Ack{Group: 1, Ranges: []AddressRange{{2, 1}}}, code.InvalidArgument, "First 2 is above Last 1"},
		{"ack of 1,024", &Ack{Group: 1, Ranges: []AddressRange{{1, 1024}}}, code.OK, ""},
		{"ack of 1,025", &Ack{Group: 1, Ranges: []AddressRange{{1, 1024}, {5, 5}}}, code.BatchTooLarge, "Ranges"},
		{"ack of everything", &Ack{Group: 1, Ranges: []AddressRange{{1, MaxAddress}, {1, MaxAddress}}}, code.BatchTooLarge, "Ranges"},
		{"group op", &Group{Op: 9}, code.InvalidArgument, "Op 9"},
		{"group name", &Group{Op: GroupCreate, OperationID: 1, Name: "$other", Config: defaultConfig()}, code.InvalidName, "Name: name"},
		{"group operation", &Group{Op: GroupCreate, Name: "a", Config: defaultConfig()}, code.InvalidArgument, "OperationID"},
		{"group config", &Group{Op: GroupConfigure, ID: 1}, code.InvalidArgument, "Config: LeaseMs"},
		{"group start", &Group{Op: GroupReset, ID: 1, Start: Start{Kind: 9}}, code.InvalidArgument, "Start.Kind 9"},
		{"group start at", &Group{Op: GroupReset, ID: 1, Start: Start{Kind: StartLatest, At: 1}}, code.InvalidArgument, "Start.At"},
		{"group start high", &Group{Op: GroupReset, ID: 1, Start: Start{Kind: StartAddress, At: math.MaxUint64}}, code.InvalidArgument, "Start.At"},
		{"group id", &Group{Op: GroupDelete}, code.InvalidArgument, "Group is 0"},
		{"expire nothing", &Expire{Group: 1}, code.BatchEmpty, "Entries"},
		{"expire too many", &Expire{Group: 1, Entries: make([]ExpireEntry, 1025)}, code.BatchTooLarge, "Entries"},
		{"expire kind", &Expire{Group: 1, Entries: []ExpireEntry{{Address: 1}}}, code.InvalidArgument, "Entries[0]: Kind 0"},
		{"expire address", &Expire{Group: 1, Entries: []ExpireEntry{{Kind: ExpireDead}}}, code.InvalidArgument, "Address is 0"},
		{"expire reason", &Expire{Group: 1, Entries: []ExpireEntry{{Kind: ExpireDead, Address: 1, Reason: string(big(256))}}}, code.InvalidArgument, "Reason has 256"},
		{"expire consumer", &Expire{Group: 1, Entries: []ExpireEntry{{Kind: ExpireLease, Address: 1, Consumer: string(big(81))}}}, code.InvalidArgument, "Consumer has 81"},
		{"export state", &Expire{Group: 1, Entries: []ExpireEntry{{Kind: ExpireExport, Address: 1, ExportState: ExportDone + 1}}}, code.InvalidArgument, "ExportState 4"},
		{"home", &Home{Group: 1}, code.InvalidArgument, "NewHome"},
		{"retention addresses", &Retention{Park: []Address{0}}, code.InvalidArgument, "[0]: Park"},
		{"retention count", &Retention{Park: make([]Address, 600), Reclaim: make([]Address, 600)}, code.BatchTooLarge, "1200"},
		{"retention delayed", &Retention{Delayed: []DelayedChange{{}}}, code.InvalidArgument, "Delayed[0]: Address"},
		{"retention options", &Retention{Options: &QueueOptions{}}, code.InvalidArgument, "MaxBodyBytes"},
		{"retention forget", &Retention{Forget: []Producer{{Kind: ProducerClient, ID: 1}}}, code.InvalidArgument, "Forget[0]"},
		{"retention line", &Retention{ReclaimLine: MaxAddress + 1}, code.InvalidArgument, "ReclaimLine"},
		{"import id", &Retention{Import: &Import{}}, code.InvalidArgument, "ID"},
		{"import alone", &Retention{Import: &Import{ID: 1}, DropTo: 1}, code.InvalidArgument, "alone"},
		{"import or recover", &Retention{Import: &Import{ID: 1}, Recover: &Recovery{}}, code.InvalidArgument, "alone"},
		{"import pairs", &Retention{Import: &Import{ID: 1, Pairs: []byte{1}}}, code.InvalidArgument, "Import.Pairs"},
		{"import order", &Retention{Import: &Import{ID: 1, Pairs: append(importedPairs(), importedPairs()...)}}, code.InvalidArgument, "does not follow"},
		{"import own record", &Retention{Import: &Import{ID: 1, Pairs: AppendPair(nil, metaKey, nil)}}, code.InvalidArgument, "carries"},
		{"import value", &Retention{Import: &Import{ID: 1, Pairs: AppendPair(nil, appendMessageKey(nil, 1), []byte("no message"))}}, code.InvalidArgument, "checksum"},
		{"import meta", &Retention{Import: &Import{ID: 1, Meta: []byte{9}}}, code.InvalidArgument, "Import.Meta"},
		{"stamp", &Retention{Stamp: MaxStamp + 1}, code.InvalidArgument, "Stamp"},
		{"nil", nil, code.InvalidArgument, "unknown"},
	} {
		err := Validate(c.c)
		if c.code == code.OK {
			require.NoError(t, err, c.what)
			continue
		}
		var e *code.Error
		require.ErrorAs(t, err, &e, c.what)
		require.Equal(t, c.code, e.Code, "%s: %v", c.what, err)
		require.Equal(t, code.EffectNone, e.Effect, c.what)
		require.Contains(t, e.Text, c.text, c.what)
		dst, err := EncodeCommand([]byte("kept"), c.c)
		require.Error(t, err, c.what)
		require.Equal(t, "kept", string(dst), c.what)
	}
}

func TestValidateName(t *testing.T) {
	for _, ok := range []string{"a", "Orders-2026_v1.fifo", "0", "-", "_", strings.Repeat("x", 80)} {
		require.NoError(t, ValidateName(ok), ok)
	}
	for _, bad := range []string{"", ".a", "$a", "$default", "a b", "a/b", "é", "a\x00", strings.Repeat("x", 81)} {
		var e *code.Error
		require.ErrorAs(t, ValidateName(bad), &e, "%q", bad)
		require.Equal(t, code.InvalidName, e.Code)
	}
	require.NoError(t, ValidateGroupName(DefaultGroup))
	require.Error(t, ValidateGroupName("$other"))
}

func TestOptionsDefaultsAndBounds(t *testing.T) {
	o, c := defaultOptions(), defaultConfig()
	require.NoError(t, o.Validate())
	require.NoError(t, c.Validate())
	require.Equal(t, QueueOptions{MaxBodyBytes: 1 << 20, MaxBytes: 16 << 30, MaxDelayMs: 30 * Day, DedupMs: 300_000, Partitions: 1}, o)
	require.Equal(t, GroupConfig{LeaseMs: 30_000, MaxAttempts: 5, BackoffBaseMs: 1000, BackoffFactorPermille: 2000, BackoffCapMs: 30_000,
		JitterPermille: 100, MaxInFlight: 20_000, RecordAfterMs: 1000}, c)
	full, config := fullOptions(), fullConfig()
	require.NoError(t, full.Validate())
	require.NoError(t, config.Validate())

	bad := QueueOptions{Ordering: 9, Overflow: 9, Durability: 9, Mode: 9, MaxBodyBytes: MaxBodyBytesHard + 1, MaxBytes: 1,
		TTLMs: MaxTTLMs + 1, MaxDelayMs: MaxDelayMsHard + 1, RetainMs: MaxTTLMs + 1, DedupMs: MaxDedupMs + 1, Partitions: 2000, Partition: 2000}
	for _, field := range []string{"Ordering", "Overflow", "Durability", "Mode", "MaxBodyBytes", "MaxBytes", "TTLMs", "MaxDelayMs", "RetainMs",
		"DedupMs", "Partitions", "Partition 2000"} {
		require.ErrorContains(t, bad.Validate(), field)
	}
	retains := defaultOptions()
	retains.RetainBytes = 1
	require.ErrorContains(t, retains.Validate(), "need Mode log")

	worse := GroupConfig{LeaseMs: MaxLeaseMs + 1, MaxAttempts: 1001, BackoffBaseMs: MaxDelayMsHard + 1, BackoffFactorPermille: 999,
		BackoffCapMs: MaxDelayMsHard + 1, JitterPermille: 1001, MaxInFlight: 10_000_001, MaxInFlightPerConsumer: 10_000_002,
		RecordAfterMs: MaxLeaseMs + 1, DelaysMs: make([]uint64, 33), DeadLetterQueue: "$x"}
	worse.DelaysMs[3] = MaxDelayMsHard + 1
	for _, field := range []string{"LeaseMs", "MaxAttempts", "BackoffBaseMs", "BackoffFactorPermille", "BackoffCapMs", "JitterPermille",
		"MaxInFlight ", "MaxInFlightPerConsumer", "RecordAfterMs", "length of DelaysMs", "DelaysMs[3]", "DeadLetterQueue"} {
		require.ErrorContains(t, worse.Validate(), field)
	}
	require.True(t, errors.Is(formatErrorf("x"), ErrFormat))
}

package queue

import (
	"bytes"
	"encoding/hex"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sort"
	"testing"

	"github.com/stretchr/testify/require"
)

// One value of every kind, by name: what the golden bytes pin, and what the decoders are fed from.
func storedValues(t testing.TB) map[string][]byte {
	meta := metaValue{
		Meta: Meta{Applied: 1000, Clock: 1_764_457_200_123, Last: 500, Line: 100, FormatLevel: 2, RecoveryNumber: 1,
			Retired: true, Options: fullOptions()},
		nextGroup: 7, checkpoint: 0xc0ffee, purgedTo: 90, sweeping: true, sweepAt: DelayedKey{VisibleAt: 5, Address: 6},
	}
	for i, c := range meta.Counters.list() {
		*c = uint64(i + 1)
	}
	g := group{name: "billing", config: fullConfig(), configVersion: 2, created: Start{Kind: StartAddress, At: 99},
		home: 3, homeIndex: 800, released: true, epoch: 9, claims: 4, start: 99, hold: 99, exported: 5, base: 60, wm: diverged()}
	for i, c := range g.counterList() {
		*c = uint64(i + 1)
	}
	idle := group{name: DefaultGroup, config: defaultConfig(), configVersion: 1, home: 1, epoch: 1, wm: NewWatermark(500)}
	imported := importValue{id: 0xfeed, next: 7, keys: 1000, bytes: 300_000, loaded: true, last: []byte{kindExport, 1}}
	recovered := producerValue{epoch: 4, use: 1_764_457_200_000, low: 1, last: 2, runs: []run{{1, 5, 2}}, recovery: 9}
	producer := producerValue{epoch: 3, use: 1_764_457_200_000, low: 11, last: 30, runs: []run{{11, 100, 5}, {20, 200, 11}}}
	retry := retryValue{RetryState: RetryState{Change: 3, Round: 1, Attempts: 2, NotBefore: 1_764_457_201_000, Reason: "no stock"}, firstFailure: 1_764_457_199_000}
	lease := RecordedLease{Name: LeaseName{Epoch: 9, Number: 77}, Deadline: 1_764_457_230_000, Attempts: 2, Consumer: "worker-1"}
	begun := lease
	begun.Begun = 1_764_457_200_000
	dead := DeadLetter{Change: 4, Round: 1, Attempts: 5, Reason: "lease ran out", FirstFailure: 1, DeadAt: 2, ExportNumber: 8, ExportState: ExportExporting, Target: 40}
	op := opValue{expiresAt: 1_764_543_600_000, fingerprint: 0x0123456789abcdef, result: EncodeResult(nil, &Result{Code: 0x7000, Group: 6})}
	count := countValue{messages: 10, bytes: 2560, parked: 2, parkedBytes: 512, delayed: 1}
	return map[string][]byte{
		"meta":          meta.encode(nil),
		"message":       messageValue(t, fullMessage(), messageHead{stamp: 1_764_457_200_123, visibleAt: 9, expiresAt: 10, producer: Producer{Kind: ProducerClient, ID: 0xfeedface}, seq: 20}),
		"message_plain": messageValue(t, &Message{Body: []byte("hello")}, messageHead{stamp: 1_764_457_200_123}),
		"producer":      producer.encode(nil),
		"producer2":     recovered.encode(nil),
		"import":        imported.encode(nil),
		"dedup":         dedupValue{address: 44, expiresAt: 1_764_457_500_000}.encode(nil),
		"group":         g.encode(nil),
		"group_idle":    idle.encode(nil),
		"retry":         retry.encode(nil),
		"lease":         putLease(nil, &lease),
		"lease2":        putLease(nil, &begun),
		"dead":          putDead(nil, &dead),
		"op":            op.encode(nil),
		"count":         count.encode(nil),
		"done":          encodeDone(nil, 640),
		"export":        encodeExport(nil, 300),
	}
}

func fullMessage() *Message {
	return &Message{Key: []byte("k"), Headers: []Header{{Name: "a", Value: []byte{1, 2}}, {Name: "b"}}, Body: []byte("first")}
}

func messageValue(t testing.TB, m *Message, h messageHead) []byte {
	t.Helper()
	h.size, h.key = uint64(m.Bytes()), m.Key
	head := h.put(nil, m.Priority)
	v := make([]byte, len(head)+tailLen(m))
	fillMessage(v, head, m)
	return v
}

// decodeStored decodes a value of a kind and encodes it again.
func decodeStored(kind string, b []byte) ([]byte, error) {
	switch kind {
	case "meta":
		var v metaValue
		err := v.decode(b)
		return v.encode(nil), err
	case "message", "message_plain":
		_, err := readMessage(1, false, b)
		return b, err
	case "import":
		var v importValue
		err := v.decode(b)
		return v.encode(nil), err
	case "producer", "producer2":
		var v producerValue
		err := v.decode(b)
		return v.encode(nil), err
	case "dedup":
		var v dedupValue
		err := v.decode(b)
		return v.encode(nil), err
	case "group", "group_idle":
		var v group
		if err := v.decode(b); err != nil {
			return nil, err
		}
		return v.encode(nil), nil
	case "retry":
		var v retryValue
		err := v.decode(b)
		return v.encode(nil), err
	case "lease", "lease2":
		v, err := readLease(b)
		return putLease(nil, &v), err
	case "dead":
		v, err := readDead(1, b)
		return putDead(nil, &v), err
	case "op":
		var v opValue
		err := v.decode(b)
		return v.encode(nil), err
	case "count":
		var v countValue
		err := v.decode(b)
		return v.encode(nil), err
	case "done":
		v, err := decodeDone(b)
		return encodeDone(nil, v), err
	case "export":
		v, err := decodeExport(b)
		return encodeExport(nil, v), err
	}
	panic("BUG: no decoder for " + kind)
}

func TestStoredValueGolden(t *testing.T) {
	for kind, b := range storedValues(t) {
		t.Run(kind, func(t *testing.T) {
			golden(t, "value_"+kind, "value of a "+kind+" record", b)
			again, err := decodeStored(kind, b)
			require.NoError(t, err)
			require.Equal(t, b, again)
		})
	}
}

// A value that was cut, or is of another format, is corruption: it is reported, never guessed at.
func TestStoredValueCutOrOfAnotherFormatIsCorrupt(t *testing.T) {
	for kind, b := range storedValues(t) {
		for n := range b {
			_, err := decodeStored(kind, b[:n:n])
			require.ErrorIs(t, err, ErrCorrupt, "%s cut to %d of %d bytes", kind, n, len(b))
		}
		for _, format := range []byte{0, 2, 255} {
			if format == b[0] {
				continue
			}
			other := bytes.Clone(b)
			other[0] = format
			_, err := decodeStored(kind, other)
			require.ErrorIs(t, err, ErrCorrupt, "%s of format %d", kind, format)
		}
	}
}

// The checksum covers a message's whole value: no flipped bit passes.
func TestStoredMessageWithAFlippedBitIsCorrupt(t *testing.T) {
	b := storedValues(t)["message"]
	for i := range b {
		for bit := range 8 {
			bad := bytes.Clone(b)
			bad[i] ^= 1 << bit
			_, err := readMessage(1, false, bad)
			require.ErrorIs(t, err, ErrCorrupt, "byte %d bit %d", i, bit)
		}
	}
}

func TestStoredMessageKeepsEverything(t *testing.T) {
	m := fullMessage()
	head := messageHead{stamp: 1, visibleAt: 2, expiresAt: 3, producer: Producer{Kind: ProducerOutbox, ID: 4, Sub: 5}, seq: 6}
	b := messageValue(t, m, head)
	got, err := readMessage(77, true, b)
	require.NoError(t, err)
	want := StoredMessage{Address: 77, Stamp: 1, VisibleAt: 2, ExpiresAt: 3, Producer: head.producer, Seq: 6, Parked: true,
		Key: m.Key, Headers: []Header{{"a", []byte{1, 2}}, {"b", nil}}, Body: m.Body}
	if len(got.Headers) == 2 && len(got.Headers[1].Value) == 0 {
		got.Headers[1].Value = nil
	}
	require.Equal(t, want, got)
	b[len(b)-10] ^= 1 // the reader got copies
	require.Equal(t, "first", string(got.Body))

	moved, err := rewriteMessage(messageValue(t, m, head), messageDelayed, 1<<40)
	require.NoError(t, err)
	got, err = readMessage(77, true, moved)
	require.NoError(t, err)
	require.Equal(t, Stamp(1<<40), got.VisibleAt)
	require.Equal(t, "first", string(got.Body))
	h, err := readHead(moved)
	require.NoError(t, err)
	require.Equal(t, byte(messageDelayed), h.flags)
	require.Equal(t, uint64(m.Bytes()), h.size)
	require.Equal(t, "k", string(h.key))
}

func TestReadingAHeadDoesNotReadTheBody(t *testing.T) {
	large := messageValue(t, &Message{Key: []byte("k"), Body: make([]byte, 1<<20)}, messageHead{stamp: 1})
	n := testing.AllocsPerRun(100, func() {
		if _, err := readHead(large); err != nil {
			t.Fatal(err)
		}
	})
	require.Zero(t, n)
}

// keysInOrder is one key of every kind and, where the order matters, its neighbours. It is in the order of the bytes.
func keysInOrder() [][]byte {
	client := Producer{Kind: ProducerClient, ID: 1 << 40}
	var hash dedupHash
	hash[0] = 0xab
	return [][]byte{
		metaKey,
		appendMessageKey(nil, 1),
		appendMessageKey(nil, 255),
		appendMessageKey(nil, 256),
		appendMessageKey(nil, MaxAddress),
		appendKey1(nil, kindParked, 5),
		appendDelayedKey(nil, DelayedKey{VisibleAt: 9, Address: 300}),
		appendDelayedKey(nil, DelayedKey{VisibleAt: 10, Address: 1}),
		appendDelayedKey(nil, DelayedKey{VisibleAt: 10, Address: 2}),
		appendProducerKey(nil, client),
		appendProducerKey(nil, Producer{Kind: ProducerOutbox, ID: 1, Sub: 2}),
		appendProducerUseKey(nil, 7, client),
		appendProducerUseKey(nil, 8, client),
		appendDedupKey(nil, hash),
		appendDedupAgeKey(nil, 7, hash),
		appendKey1(nil, kindGroup, 1),
		appendKey1(nil, kindGroup, 2),
		appendGroupNameKey(nil, "a"),
		appendGroupNameKey(nil, "billing"),
		appendDoneKey(nil, goneSet, 0, 64),
		appendDoneKey(nil, 1, 0, 128),
		appendDoneKey(nil, 1, 63, 127),
		appendGroupAddressKey(nil, kindRetry, 1, 3),
		appendGroupAddressKey(nil, kindLease, 1, 3),
		appendGroupAddressKey(nil, kindDead, 1, 3),
		appendKey1(nil, kindOp, 81),
		appendKey2(nil, kindOpAge, 7, 81),
		appendKey1(nil, kindCount, bucketOf(4096)),
		appendKey2(nil, kindExport, 1, 255),
		appendKey2(nil, kindExport, 1, 256),
		importKey,
		{kindEnd},
	}
}

func TestKeysSortByWhatTheyName(t *testing.T) {
	keys := keysInOrder()
	require.True(t, sort.SliceIsSorted(keys, func(i, j int) bool { return bytes.Compare(keys[i], keys[j]) < 0 }))
	text := "# keys, after shard and incarnation, in order\n"
	for _, k := range keys {
		text += hex.EncodeToString(k) + "\n"
	}
	path := filepath.Join("testdata", "golden", "keys.txt")
	if *rewriteGolden {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), text)
}

func TestKeysParse(t *testing.T) {
	k := DelayedKey{VisibleAt: 1 << 40, Address: 77}
	require.Equal(t, k, delayedKeyOf(appendDelayedKey(nil, k)))
	p := Producer{Kind: ProducerOutbox, ID: 1 << 60, Sub: 9}
	use, got := producerOfUseKey(appendProducerUseKey(nil, 55, p))
	require.Equal(t, Stamp(55), use)
	require.Equal(t, p, got)
	require.Equal(t, uint64(MaxAddress), lastU64(appendMessageKey(nil, MaxAddress)))
}

func TestLanesAndBuckets(t *testing.T) {
	require.Equal(t, LaneCount, lanes)
	for _, a := range []Address{0, 1, 63, 64, 65, 1000, MaxAddress - 64} {
		require.Equal(t, LaneOf(a), laneOf(a))
		for l := range lanes {
			first := firstInLane(l, a)
			require.Greater(t, first, a)
			require.LessOrEqual(t, first, a+lanes)
			require.Equal(t, l, laneOf(first))
		}
	}
	for _, a := range []Address{0, 1, 4095, 4096, 8191, MaxAddress} {
		b := bucketOf(a)
		require.LessOrEqual(t, bucketFirst(b), a)
		require.GreaterOrEqual(t, bucketLast(b), a)
		require.Equal(t, bucketFirst(b+1), bucketLast(b)+1)
	}
}

// FuzzStoredValue: no bytes make a decoder panic or allocate beyond them.
func FuzzStoredValue(f *testing.F) {
	kinds := []string{"meta", "message", "producer", "dedup", "group", "retry", "lease", "dead", "op", "count", "done"}
	values := storedValues(f)
	for i, kind := range kinds {
		f.Add(uint8(i), values[kind])
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		name := kinds[int(kind)%len(kinds)]
		if _, err := decodeStored(name, b); err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
		}
	})
}

// Damaged values of every kind: a decoder either reports corruption or gives a value that can be encoded.
func TestStoredValueMutations(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for kind, good := range storedValues(t) {
		for range 2000 {
			b := bytes.Clone(good)
			for range 1 + rng.IntN(4) {
				switch rng.IntN(3) {
				case 0:
					b[rng.IntN(len(b))] = byte(rng.Uint32())
				case 1:
					b = b[:1+rng.IntN(len(b))]
				default:
					at := rng.IntN(len(b))
					b = append(b[:at:at], append([]byte{byte(rng.Uint32())}, b[at:]...)...)
				}
			}
			if _, err := decodeStored(kind, b); err != nil {
				require.ErrorIs(t, err, ErrCorrupt, "%s % x", kind, b)
			}
		}
	}
}

package outbox

import (
	"strconv"
	"strings"

	"github.com/tierq/tierq/queue"
)

// Headers of a copy, beside those of the message. Those of an earlier dead letter are replaced, but for the hops, which
// count on.
const (
	headerPrefix = "tierq-dead-"

	HeaderQueue        = headerPrefix + "queue"
	HeaderPartition    = headerPrefix + "partition"
	HeaderGroup        = headerPrefix + "group"
	HeaderAddress      = headerPrefix + "address"
	HeaderAttempts     = headerPrefix + "attempts"
	HeaderReason       = headerPrefix + "reason"
	HeaderFirstFailure = headerPrefix + "first-failure-unix-ms"
	HeaderLastFailure  = headerPrefix + "last-failure-unix-ms"
	HeaderHops         = headerPrefix + "hops"
)

// MaxHops is how many dead-letter queues a message may go through.
const MaxHops = 8

// Hops is how many dead-letter queues a message has come through. What is no number counts as none.
func Hops(headers []queue.Header) int {
	for i := range headers {
		if headers[i].Name == HeaderHops {
			n, err := strconv.ParseUint(string(headers[i].Value), 10, 16)
			if err != nil {
				return 0
			}
			return int(n)
		}
	}
	return 0
}

// Origin is where a dead letter lies.
type Origin struct {
	Queue     string
	Partition uint32
	Group     string
}

// Copy makes the message for the dead-letter queue: body, key and headers, and where it comes from. Its times to live and
// delays are the target's own. why is not empty when there can be none: the letter is to stay where it is.
func Copy(d *queue.DeadLetter, from Origin) (m queue.Message, why string) {
	hops := Hops(d.Message.Headers) + 1
	if hops > MaxHops {
		return m, "it has come through " + strconv.Itoa(hops-1) + " dead-letter queues: they lead to each other"
	}
	m = queue.Message{Seq: queue.Seq(d.ExportNumber), Key: d.Message.Key, Body: d.Message.Body}
	for _, h := range d.Message.Headers {
		if !strings.HasPrefix(h.Name, headerPrefix) {
			m.Headers = append(m.Headers, h)
		}
	}
	add := func(name, value string) {
		m.Headers = append(m.Headers, queue.Header{Name: name, Value: []byte(value)})
	}
	number := func(name string, value uint64) { add(name, strconv.FormatUint(value, 10)) }
	add(HeaderQueue, from.Queue)
	number(HeaderPartition, uint64(from.Partition))
	add(HeaderGroup, from.Group)
	number(HeaderAddress, uint64(d.Address))
	number(HeaderAttempts, uint64(d.Attempts))
	add(HeaderReason, d.Reason)
	number(HeaderFirstFailure, uint64(d.FirstFailure))
	number(HeaderLastFailure, uint64(d.DeadAt))
	number(HeaderHops, uint64(hops))
	if len(m.Headers) > queue.MaxHeaders || headerBytes(m.Headers) > queue.MaxHeaderBytes {
		return m, "its own headers leave no room for those of a dead letter"
	}
	return m, ""
}

func headerBytes(headers []queue.Header) (n int) {
	for i := range headers {
		n += len(headers[i].Name) + len(headers[i].Value)
	}
	return n
}

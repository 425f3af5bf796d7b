package node

import (
	"time"

	"github.com/stretchr/testify/require"

	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// testPartitionsActive: of two consumers each is the single active one of one partition, and stays so over a move of the homes, as it
// holds something there. How a partition's changes is in TestSingleActiveConsumerOfEachPartition of queue/home.
func testPartitionsActive(f *partitionFleet) {
	f.queue("active", 2, nil)
	g, err := f.c.CreateGroup(f.ctx, &tierqv1.CreateGroupRequest{Queue: "active", Name: "g", Config: &tierqv1.GroupConfig{SingleActiveConsumer: true, LeaseMs: 600_000}})
	require.NoError(f, err)
	names := []string{"one", "two"}
	receive := func(p uint32, consumer string) int {
		ds, err := f.c.Receive(f.ctx, "active", "g", client.ReceiveOptions{Partition: &p, Consumer: consumer, Wait: 200 * time.Millisecond})
		require.NoError(f, err)
		return len(ds)
	}
	gets := func(p uint32, consumer string) {
		f.Helper()
		require.Eventually(f, func() bool { return receive(p, consumer) == 1 }, time.Minute, time.Millisecond, "%s in partition %d", consumer, p)
	}
	for p := range uint32(2) {
		_, err := f.c.PublishWith(f.ctx, "active", client.PublishOptions{Partition: &p}, make([]client.Message, 9)...)
		require.NoError(f, err)
		gets(p, names[p])
		require.Zero(f, receive(p, names[1-p]), "partition %d has an active consumer", p)
	}
	// Each home goes to the other host.
	for p := range uint32(2) {
		to := 3 - g.Partitions[p].HomeHost
		_, err := f.c.MoveGroup(f.ctx, "active", "g", to, p)
		require.NoError(f, err)
		require.Zero(f, receive(p, names[1-p]), "it moved with what it holds")
		gets(p, names[p])
		list, err := f.c.ListConsumers(f.ctx, "active", "g", false, p)
		require.NoError(f, err)
		require.Equal(f, to, list.HomeHost)
		require.Len(f, list.Consumers, 1)
		require.Equal(f, names[p], list.Consumers[0].Name)
		require.True(f, list.Consumers[0].Active)
		require.EqualValues(f, 2, list.Consumers[0].InFlight, "of before and after the move")
	}
}

package code

// table is the registry, one row a code, in numeric order. Part of the wire format: only grows.
var table = []Info{
	{Malformed, "MALFORMED_PAYLOAD", ClassFatal, "the request cannot be decoded: fix the client"},
	{NotAuthenticated, "NOT_AUTHENTICATED", ClassFatal, "send a token with the request"},
	{AuthFailed, "AUTH_FAILED", ClassTransient, "check the token"},
	{UnknownQueue, "UNKNOWN_QUEUE", ClassPermanent, "the queue does not exist: create it with `tierq queue create NAME`"},
	{UnknownPartition, "UNKNOWN_PARTITION", ClassPermanent, "the queue has no such partition: `tierq queue describe NAME` lists them"},
	{Internal, "INTERNAL", ClassOperator, "an internal fault: see the host's log and report it"},
	{InvalidName, "INVALID_NAME", ClassPermanent, "names are 1 to 80 of A-Z a-z 0-9 . _ - and begin with neither . nor $"},
	{InvalidArgument, "INVALID_ARGUMENT", ClassPermanent, "a field of the request is out of its bounds: fix the request"},
	{TooLarge, "TOO_LARGE", ClassPermanent, "the message is larger than the queue allows: send less, or raise the queue's max body bytes"},
	{BatchEmpty, "BATCH_EMPTY", ClassPermanent, "the batch is empty: send at least one entry"},
	{BatchTooLarge, "BATCH_TOO_LARGE", ClassPermanent, "the batch has too many entries or bytes: split it"},
	{SeqGap, "SEQ_GAP", ClassRenegotiate, "the producer's preceding seq is missing: publish it first"},
	{SeqExpired, "SEQ_EXPIRED", ClassRenegotiate, "the seq lies below the producer's window, its outcome is forgotten: do not repeat it"},
	{ProducerEpochStale, "PRODUCER_EPOCH_STALE", ClassRenegotiate, "a newer instance of this producer has registered: stop, or register again"},
	{ProducerSeqInvalid, "PRODUCER_SEQ_INVALID", ClassPermanent, "a producer's seqs begin at 1 and rise: fix the client"},
	{ExpectedLastAddress, "EXPECTED_LAST_ADDRESS", ClassPermanent, "the partition's last address is another one: read again and decide again"},
	{AtomicRefused, "ATOMIC_REFUSED", ClassPermanent, "another message of the atomic publish was refused, so none was stored: its own code tells what to fix"},
	{InvalidReceipt, "INVALID_RECEIPT", ClassPermanent, "this is not a receipt of this queue and group: use the one that receive returned"},
	{DelayTooLong, "DELAY_TOO_LONG", ClassPermanent, "the delay exceeds the queue's limit: shorten it, or raise the queue's max delay"},
	{WrongPartition, "WRONG_PARTITION", ClassRenegotiate, "the key belongs to another partition: ask for the queue's partitions again"},
	{AtomicPartitions, "ATOMIC_PARTITIONS", ClassPermanent, "an atomic publish must fit one partition: give its messages one key, or name the partition; transactions over partitions are not offered"},
	{NotPermitted, "NOT_PERMITTED", ClassFatal, "the token does not allow this: use one with the role that the details name"},
	{StaleGeneration, "STALE_GENERATION", ClassRenegotiate, "the assignment has changed: ask again"},
	{NotOwner, "NOT_OWNER", ClassRenegotiate, "this host is not the group's home: go to the home that the details name"},
	{StaleOwner, "STALE_OWNER", ClassRenegotiate, "the group has a new home or was reset since: receive again"},
	{UnknownDelivery, "UNKNOWN_DELIVERY", ClassNoop, "the lease is unknown or has run out: nothing was changed, the message may come again"},
	{MaxWaitingPulls, "MAX_WAITING_PULLS", ClassTransient, "too many receives wait here: wait for one to end"},
	{UnknownMessage, "UNKNOWN_MESSAGE", ClassNoop, "there is no such message: it was finished, purged, or never existed"},
	{Skipped, "SKIPPED", ClassNoop, "the message has changed since this was decided: nothing was changed"},
	{ConsumerLimit, "CONSUMER_LIMIT", ClassTransient, "the in-flight limit of the group or consumer is reached: ack something first"},
	{DeadTargetDown, "DEAD_TARGET_DOWN", ClassTransient, "the dead-letter queue cannot take it now: it stays here and is tried again"},
	{DeadExporting, "DEAD_EXPORTING", ClassPermanent, "the dead letter is on its way to the dead-letter queue: redrive it from there"},
	{QueueExistsMismatch, "QUEUE_EXISTS_MISMATCH", ClassPermanent, "a queue of this name exists with other options: change the options or the name"},
	{GroupExistsMismatch, "GROUP_EXISTS_MISMATCH", ClassPermanent, "a group of this name exists with another configuration: change the configuration or the name"},
	{MetadataReadOnly, "METADATA_READ_ONLY", ClassTransient, "the catalog has no quorum: wait, or bring its hosts back"},
	{MetadataQuarantined, "METADATA_QUARANTINED", ClassOperator, "the partition is isolated: see the quarantine page of the operating guide"},
	{UnknownGroup, "UNKNOWN_GROUP", ClassPermanent, "the group does not exist: create it with `tierq group create QUEUE GROUP`"},
	{MutationFenced, "MUTATION_FENCED", ClassRenegotiate, "this was decided on an older state: read again and decide again"},
	{QueueRetired, "QUEUE_RETIRED", ClassPermanent, "the queue is being deleted: publish to another one, or create it again once it is gone"},
	{UnknownHost, "UNKNOWN_HOST", ClassPermanent, "the fleet has no such host: `tierq host list` names them"},
	{NoPlacement, "NO_PLACEMENT", ClassPermanent, "the fleet has not enough hosts in distinct failure domains for this layout: add hosts or ask for fewer replicas"},
	{GroupPaused, "GROUP_PAUSED", ClassTransient, "the group or queue is paused: resume it"},
	{LimitReached, "LIMIT_REACHED", ClassPermanent, "a limit of this host or shard is reached: the details name it, remove something or add hosts"},
	{HostRefused, "HOST_REFUSED", ClassFatal, "the fleet does not take this host back: give it another id and an empty data directory, and let it join with a token"},
	{ReplicaNeeded, "REPLICA_NEEDED", ClassPermanent, "the other replicas could not go on without this one: bring them back, or let another host join, first"},
	{Backpressure, "BACKPRESSURE", ClassTransient, "too much is in flight: repeat after a pause"},
	{QuotaExceeded, "QUOTA_EXCEEDED", ClassTransient, "the tenant's quota is used up: slow down, or raise it with `tierq tenant`"},
	{RateLimited, "RATE_LIMITED", ClassTransient, "requests come faster than the limit allows: slow down"},
	{StorageHighWatermark, "STORAGE_HIGH_WATERMARK", ClassTransient, "the disk is nearly full, publishes are refused and consumers go on: consume, purge, or add space"},
	{MessageExceedsCredit, "MESSAGE_EXCEEDS_CREDIT", ClassPermanent, "the message is larger than the consumer's byte credit: raise it"},
	{QueueFull, "QUEUE_FULL", ClassTransient, "the queue's limit is reached: consume, purge, or raise its limit"},
	{QuorumLost, "QUORUM_LOST", ClassTransient, "the outcome is unknown: repeat with the same producer id and seq"},
	{ReadOnlyDegraded, "READ_ONLY_DEGRADED", ClassTransient, "the shard has no quorum for writes, nothing was stored: wait for recovery"},
	{InSyncNotEnough, "IN_SYNC_REPLICAS_NOT_ENOUGH", ClassTransient, "the queue is strict and has fewer than two full replicas in sync: bring the missing one back"},
	{FollowerLag, "FOLLOWER_LAG", ClassWarning, "stored, but a full replica lags behind"},
	{StaleLeader, "STALE_LEADER_EPOCH", ClassRenegotiate, "the leader has changed: ask again"},
	{LeaseExpired, "LEASE_EXPIRED", ClassRenegotiate, "the home's lease ended: ask again"},
	{Divergent, "DIVERGENT_COMMITTED", ClassOperator, "this replica is isolated because its state differs: see the quarantine page of the operating guide"},
	{NoLeader, "NO_LEADER", ClassTransient, "the shard has no leader now: repeat after a pause"},
	{ShuttingDown, "SHUTTING_DOWN", ClassTransient, "this host is stopping: go to another one"},
	{ClockSkew, "CLOCK_SKEW", ClassOperator, "this host's clock differs from the fleet's: fix it, or run `tierq doctor --accept-clock`"},
	{NotReplica, "NOT_REPLICA", ClassRenegotiate, "this host holds no replica of the partition: go to the host that the details name"},
	{Unavailable, "UNAVAILABLE", ClassTransient, "the host that serves this cannot be reached: repeat after a pause"},
	{DeadlineExceeded, "DEADLINE_EXCEEDED", ClassTransient, "the time ran out before anything was tried: repeat, or allow more time"},
	{WrongFleet, "WRONG_FLEET", ClassFatal, "the other side belongs to another fleet: check the addresses"},
	{OK, "OK", ClassOK, "done"},
	{Unknown, "OUTCOME_UNKNOWN", ClassTransient, "the command was covered by an installed state, its outcome cannot be told: repeat with the same producer id and seq"},
}

var byCode = func() map[Code]Info {
	m := make(map[Code]Info, len(table))
	for _, i := range table {
		m[i.Code] = i
	}
	return m
}()

// All returns the registry in numeric order.
func All() []Info { return append([]Info(nil), table...) }

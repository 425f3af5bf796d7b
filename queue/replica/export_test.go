package replica

// SetStuck makes the replica one that waits on a poison entry, or not.
func (r *Replica) SetStuck(stuck bool) { r.stuck.Store(stuck) }

// EngineOutOfDate is dragonboat's own error.
var EngineOutOfDate = engineOutOfDate

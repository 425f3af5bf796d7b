// Package fault runs a fleet of real processes, kills and freezes them, and keeps accounts of every message: what was
// acknowledged must be received, what was acked must not come again, and nothing may be invented.
//
// The tests start processes, so they are skipped under -short. Each prints the seed that it drew from (-seed repeats it)
// and one line of account. They use only what a user has: the binary, its configuration file, the API, and the Go client.
package fault

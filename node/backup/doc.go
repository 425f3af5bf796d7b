// Package backup keeps backups of queues in directories: a manifest, and a stream per partition (docs/format/backup.md). It saves
// from a fleet and restores into one over the public API, and verifies offline. It holds no more than a chunk in memory.
package backup

package main

import (
	"strconv"

	"github.com/spf13/cobra"
)

// partitionFlag is --partition of a command.
type partitionFlag struct{ given *uint32 }

// add adds the flag; without it the command means what missing says.
func (f *partitionFlag) add(c *cobra.Command, missing string) {
	c.Flags().Var(f, "partition", "one partition of the queue, from 0 (default: "+missing+")")
}

const (
	allPartitions = "all"
	onlyPartition = "the only one; must be named when there are several"
)

// list is for calls that take at most one.
func (f *partitionFlag) list() []uint32 {
	if f.given == nil {
		return nil
	}
	return []uint32{*f.given}
}

// String implements pflag.Value.
func (f *partitionFlag) String() string {
	if f.given == nil {
		return ""
	}
	return strconv.FormatUint(uint64(*f.given), 10)
}

// Set implements pflag.Value.
func (f *partitionFlag) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return usagef("--partition %q: it is a number from 0", s)
	}
	p := uint32(n)
	f.given = &p
	return nil
}

// Type implements pflag.Value.
func (f *partitionFlag) Type() string { return "number" }

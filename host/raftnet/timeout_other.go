//go:build !linux

package raftnet

import "net"

// setUserTimeout has no counterpart here: writes have a deadline.
func setUserTimeout(net.Conn) {}

package raftnet

import (
	"net"

	"golang.org/x/sys/unix"
)

// setUserTimeout ends a connection whose data are not acknowledged for frameTimeout. Where it cannot be set, writes still have
// a deadline.
func setUserTimeout(c net.Conn) {
	tc, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := tc.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(frameTimeout.Milliseconds()))
	})
}

package catalog

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

// A token's text is a prefix, so that one found in a log is known for what it is, and a secret. The catalog keeps the secret's hash.
const (
	secretBytes  = 32
	accessPrefix = "tierq-"
	joinPrefix   = "tierq-join-"
)

// newSecret makes a secret, and a random id that is not 0.
func newSecret() (id uint64, secret []byte) {
	random := make([]byte, 8+secretBytes)
	_, _ = rand.Read(random) // never fails
	return binary.BigEndian.Uint64(random) | 1, random[8:]
}

func hashSecret(text string) (hash [sha256.Size]byte, ok bool) {
	secret, err := hex.DecodeString(text)
	if err != nil || len(secret) != secretBytes {
		return hash, false
	}
	return sha256.Sum256(secret), true
}

// NewAccessToken makes a token and its text, which nobody can make again. Its id has 48 bits.
func NewAccessToken(tenant string, roles Roles, name string) (t AccessToken, text string) {
	id, secret := newSecret()
	return AccessToken{ID: id>>16 | 1, Hash: sha256.Sum256(secret), Tenant: tenant, Roles: roles, Name: name}, accessPrefix + hex.EncodeToString(secret)
}

// HashAccessToken returns the hash under which the token of a text is kept; false for what is no token.
func HashAccessToken(text string) (hash [sha256.Size]byte, ok bool) {
	secret, ok := strings.CutPrefix(strings.TrimSpace(text), accessPrefix)
	if !ok {
		return hash, false
	}
	return hashSecret(secret)
}

// NewJoinToken makes a token and its text, which nobody can make again.
func NewJoinToken(expiresMs uint64) (t JoinToken, text string) {
	id, secret := newSecret()
	return JoinToken{ID: id, Hash: sha256.Sum256(secret), ExpiresMs: expiresMs}, fmt.Sprintf("%s%x-%x", joinPrefix, id, secret)
}

// ParseJoinToken reads the text of a join token. Its error does not repeat the text.
func ParseJoinToken(text string) (id uint64, hash [sha256.Size]byte, err error) {
	rest, prefixed := strings.CutPrefix(strings.TrimSpace(text), joinPrefix)
	number, secret, _ := strings.Cut(rest, "-")
	id, err = strconv.ParseUint(number, 16, 64)
	hash, whole := hashSecret(secret)
	if !prefixed || !whole || err != nil || id == 0 {
		return 0, hash, fmt.Errorf("this is not a join token: it begins with %s and comes from `tierq host token`", joinPrefix)
	}
	return id, hash, nil
}

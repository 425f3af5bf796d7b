// Empty: it lets the compiler accept the body-less function in plain_test.go.

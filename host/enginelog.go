package host

import (
	"fmt"
	"sync"

	"github.com/lni/dragonboat/v4/logger"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

var (
	engineLogOnce sync.Once
	engineLogErr  error
)

// routeEngineLog sends the engine's log to zap. The engine has one logger for the process, so the first host's is used for
// all; it names no host.
func routeEngineLog(to *zap.Logger) error {
	engineLogOnce.Do(func() {
		defer func() {
			if r := recover(); r != nil {
				engineLogErr = fmt.Errorf("set the engine's logger: %v", r)
			}
		}()
		logger.SetLoggerFactory(func(pkg string) logger.ILogger {
			l := &engineLog{to: to.Named("raft." + pkg).WithOptions(zap.AddCallerSkip(2)).Sugar(), errors: zapcore.WarnLevel}
			if pkg == "transport" {
				l.errors = zapcore.DebugLevel // a host that is gone; the peer API says so, once
			}
			return l
		})
	})
	return engineLogErr
}

// engineLog is one package's log. The engine reports each election, each dropped proposal and each lost connection as a
// warning or worse; these are an ordinary day, so all but its errors are quieted by one level.
type engineLog struct {
	to     *zap.SugaredLogger
	errors zapcore.Level
}

func (l *engineLog) SetLevel(logger.LogLevel)          { /* the zap core decides */ }
func (l *engineLog) Debugf(format string, args ...any) {}
func (l *engineLog) Infof(format string, args ...any)  { l.to.Logf(zapcore.DebugLevel, format, args...) }
func (l *engineLog) Warningf(format string, args ...any) {
	l.to.Logf(zapcore.DebugLevel, format, args...)
}
func (l *engineLog) Errorf(format string, args ...any) { l.to.Logf(l.errors, format, args...) }

// Panicf must not return: the engine relies on it.
func (l *engineLog) Panicf(format string, args ...any) {
	l.to.Errorf(format, args...)
	panic(fmt.Sprintf(format, args...))
}

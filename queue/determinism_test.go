package queue_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// allowed lists what the rules of determinism would refuse, by "function: finding", with the reason why it decides
// nothing that is stored or answered.
var allowed = map[string]string{
	"QueueStateMachine.cacheProducer: range over a map": "evicts any one producer from the cache; what is evicted is read again from its key",
}

// forbiddenImports can make two replicas differ, or make apply wait.
var forbiddenImports = []string{"time", "math/rand", "math/rand/v2", "crypto/rand", "os", "net", "context", "maps", "math"}

// TestDeterminism reads the package's own source for G7: what apply does follows from the command and the keys alone,
// so there is no clock, goroutine, random number, map order or float. The check is a conservative one: it does not ask
// whether apply reaches a place.
func TestDeterminism(t *testing.T) {
	findings := determinismFindings(t, ".")
	for where, what := range findings {
		if _, ok := allowed[what]; !ok {
			t.Errorf("%s: %s", where, what)
		}
	}
	for what := range allowed {
		require.Contains(t, mapValues(findings), what, "an exception that is not needed any more")
	}
}

func mapValues(m map[string]string) (list []string) {
	for _, v := range m {
		list = append(list, v)
	}
	slices.Sort(list)
	return list
}

// determinismFindings maps positions to findings.
func determinismFindings(t *testing.T, dir string) map[string]string {
	fset := token.NewFileSet()
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	require.NoError(t, err)
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, 0)
		require.NoError(t, err)
		files = append(files, f)
	}
	require.NotEmpty(t, files)
	// Other packages are left empty, for speed: what comes from them has no type, and to range over it is a finding.
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
	config := types.Config{Importer: emptyImporter{}, Error: func(error) {}}
	_, _ = config.Check("queue", fset, files, info)
	l := &linter{fset: fset, info: info, findings: map[string]string{}}
	for _, f := range files {
		l.file(f)
	}
	return l.findings
}

type emptyImporter struct{}

func (emptyImporter) Import(path string) (*types.Package, error) {
	p := types.NewPackage(path, filepath.Base(path))
	p.MarkComplete()
	return p, nil
}

type linter struct {
	fset     *token.FileSet
	info     *types.Info
	findings map[string]string
	function string
}

func (l *linter) found(n ast.Node, format string, args ...any) {
	p := l.fset.Position(n.Pos())
	l.findings[fmt.Sprintf("%s:%d:%d", filepath.Base(p.Filename), p.Line, p.Column)] = l.function + ": " + fmt.Sprintf(format, args...)
}

func (l *linter) file(f *ast.File) {
	l.function = "import"
	for _, i := range f.Imports {
		if path := strings.Trim(i.Path.Value, `"`); slices.Contains(forbiddenImports, path) {
			l.found(i, "imports %s", path)
		}
	}
	for _, d := range f.Decls {
		l.function = "package"
		if fn, ok := d.(*ast.FuncDecl); ok {
			l.function = functionName(fn)
		}
		ast.Inspect(d, l.node)
	}
}

func functionName(fn *ast.FuncDecl) string {
	if fn.Recv == nil || len(fn.Recv.List) == 0 {
		return fn.Name.Name
	}
	r := fn.Recv.List[0].Type
	if p, ok := r.(*ast.StarExpr); ok {
		r = p.X
	}
	if id, ok := r.(*ast.Ident); ok {
		return id.Name + "." + fn.Name.Name
	}
	return fn.Name.Name
}

func (l *linter) node(n ast.Node) bool {
	switch n := n.(type) {
	case *ast.GoStmt:
		l.found(n, "go statement")
	case *ast.SelectStmt:
		l.found(n, "select statement")
	case *ast.RangeStmt:
		l.rangeOver(n)
	case *ast.SelectorExpr:
		if id, ok := n.X.(*ast.Ident); ok && id.Name == "reflect" && n.Sel.Name == "MapRange" {
			l.found(n, "range over a map")
		}
	case ast.Expr:
		if t := l.info.TypeOf(n); t != nil && isFloat(t) {
			l.found(n, "float")
		}
	}
	return true
}

func (l *linter) rangeOver(n *ast.RangeStmt) {
	t := l.info.TypeOf(n.X)
	if t == nil || t == types.Typ[types.Invalid] {
		l.found(n, "range over a value of unknown type")
		return
	}
	if _, ok := t.Underlying().(*types.Map); ok {
		l.found(n, "range over a map")
	}
}

func isFloat(t types.Type) bool {
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&(types.IsFloat|types.IsComplex) != 0
}

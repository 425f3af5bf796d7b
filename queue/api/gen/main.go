//go:build generate

// Command gen compiles the repository's .proto files and runs the protobuf and connect generators on them, so that
// no protoc has to be installed.
//
// Usage, from the repository's root:
//
//	go run -tags generate ./queue/api/gen            # writes the generated files
//	go run -tags generate ./queue/api/gen -check     # exits 1 and names the files that are not fresh
//
// It has a tag so that the tests of all packages need not compile a protobuf compiler.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"
)

// roots are the import roots that hold .proto files, with the module path of each as a prefix of go_package.
var roots = []string{"queue/api", "host/peer"}

const module = "github.com/tierq/tierq"

func main() {
	check := flag.Bool("check", false, "only compare with the files on disk")
	flag.Parse()
	if err := run(context.Background(), *check); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, check bool) error {
	var stale []string
	for _, root := range roots {
		files, err := generate(ctx, root)
		if err != nil {
			return err
		}
		for name, content := range files {
			old, err := os.ReadFile(name)
			if err == nil && string(old) == content {
				continue
			}
			if check {
				stale = append(stale, name)
				continue
			}
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
				return err
			}
		}
	}
	if len(stale) > 0 {
		return fmt.Errorf("not fresh: %s: run `go run -tags generate ./queue/api/gen`", strings.Join(stale, ", "))
	}
	return nil
}

// generate returns the generated files of one import root by path.
func generate(ctx context.Context, root string) (map[string]string, error) {
	names, err := protoFiles(root)
	if err != nil || len(names) == 0 {
		return nil, err
	}
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{root}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	compiled, err := compiler.Compile(ctx, names...)
	if err != nil {
		return nil, fmt.Errorf("compile %s: %w", root, err)
	}
	req := &pluginpb.CodeGeneratorRequest{FileToGenerate: names, Parameter: proto.String("module=" + module)}
	seen := map[string]bool{}
	for _, f := range compiled {
		addFile(req, f, seen)
	}
	out := map[string]string{}
	for _, plugin := range []string{"protoc-gen-go", "protoc-gen-connect-go"} {
		if err := runPlugin(ctx, plugin, req, out); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func protoFiles(root string) ([]string, error) {
	var names []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if !d.IsDir() && filepath.Ext(path) == ".proto" {
			rel, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			names = append(names, filepath.ToSlash(rel))
		}
		return nil
	})
	if os.IsNotExist(err) {
		return nil, nil
	}
	return names, err
}

// addFile appends f after everything that it imports.
func addFile(req *pluginpb.CodeGeneratorRequest, f protoreflect.FileDescriptor, seen map[string]bool) {
	if seen[f.Path()] {
		return
	}
	seen[f.Path()] = true
	imports := f.Imports()
	for i := 0; i < imports.Len(); i++ {
		addFile(req, imports.Get(i).FileDescriptor, seen)
	}
	fd := protodesc.ToFileDescriptorProto(f)
	if r, ok := f.(interface {
		FileDescriptorProto() *descriptorpb.FileDescriptorProto
	}); ok {
		fd = r.FileDescriptorProto()
	}
	req.ProtoFile = append(req.ProtoFile, fd)
}

func runPlugin(ctx context.Context, plugin string, req *pluginpb.CodeGeneratorRequest, out map[string]string) error {
	in, err := proto.Marshal(req)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "tool", plugin)
	cmd.Stdin = bytes.NewReader(in)
	cmd.Stderr = os.Stderr
	answer, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w", plugin, err)
	}
	var resp pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(answer, &resp); err != nil {
		return fmt.Errorf("%s: %w", plugin, err)
	}
	if resp.Error != nil {
		return fmt.Errorf("%s: %s", plugin, resp.GetError())
	}
	for _, f := range resp.File {
		out[f.GetName()] = f.GetContent()
	}
	return nil
}

package main

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tierq/tierq/node"
	tierqv1 "github.com/tierq/tierq/queue/api/tierq/v1"
	"github.com/tierq/tierq/queue/client"
)

// authFlags are who calls. A token on the command line would be seen by everybody on the machine, so there is no flag for one.
type authFlags struct {
	file, tenant string
}

func (f *authFlags) register(fs *pflag.FlagSet) {
	fs.StringVar(&f.file, "token-file", os.Getenv("TIERQ_TOKEN_FILE"), "file with the token, where the fleet wants one (env TIERQ_TOKEN_FILE, or TIERQ_TOKEN for the token itself)")
	fs.StringVar(&f.tenant, "tenant", os.Getenv("TIERQ_TENANT"), "for operators: the tenant to act for (env TIERQ_TENANT)")
}

// token is empty without one.
func (f *authFlags) token() (string, error) {
	if f.file == "" {
		return strings.TrimSpace(os.Getenv("TIERQ_TOKEN")), nil
	}
	raw, err := os.ReadFile(f.file)
	if err != nil {
		return "", usagef("--token-file: %v", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

func tenantCommand(a *app) *cobra.Command {
	return parent("tenant", "keep tenants, which own queues and have quotas", tenantPut(a), tenantList(a), tenantDelete(a))
}

func tenantPut(a *app) *cobra.Command {
	t := &tierqv1.Tenant{}
	c := &cobra.Command{
		Use:   "put NAME",
		Short: "make a tenant, or replace its quotas",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t.Name = args[0]
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				if err := c.PutTenant(ctx, t); err != nil {
					return err
				}
				return a.print(tenantTable([]*tierqv1.Tenant{t}, false))
			})
		},
	}
	c.Flags().Uint32Var(&t.MaxQueues, "max-queues", 0, "how many queues it may have (0: any number)")
	c.Flags().Uint64Var(&t.MaxBytes, "max-bytes", 0, "how many bytes its queues may store together (0: any number)")
	c.Flags().Uint32Var(&t.PublishRate, "publish-rate", 0, "messages a second that it may publish through each host (0: any number)")
	return c
}

func tenantList(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "show the tenants with their quotas",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				ts, err := c.ListTenants(ctx)
				if err != nil {
					return err
				}
				return a.print(tenantTable(ts, true))
			})
		},
	}
}

func tenantTable(ts []*tierqv1.Tenant, queues bool) *table {
	columns := []string{"TENANT", "MAX_QUEUES", "PUBLISH_RATE"}
	if queues {
		columns = append(columns, "QUEUES")
	}
	columns = append(columns, "MAX_BYTES")
	if queues {
		columns = append(columns, "STORED_BYTES")
	}
	t := newTable(columns...)
	for _, one := range ts {
		row := []any{one.Name, one.MaxQueues, one.PublishRate}
		if queues {
			row = append(row, one.Queues)
		}
		row = append(row, one.MaxBytes)
		if queues {
			row = append(row, one.StoredBytes)
		}
		t.add(row...)
	}
	return t
}

func tenantDelete(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "delete NAME",
		Short: "remove a tenant that has no queues, and its tokens",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error { return c.DeleteTenant(ctx, args[0]) })
		},
	}
}

func tokenCommand(a *app) *cobra.Command {
	return parent("token", "keep the tokens with which clients call", tokenCreate(a), tokenList(a), tokenRevoke(a), tokenGenerate(a))
}

func tokenCreate(a *app) *cobra.Command {
	t := &tierqv1.Token{}
	c := &cobra.Command{
		Use:   "create TENANT",
		Short: "make a token for a tenant, and show it this once",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t.Tenant = args[0]
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				res, err := c.CreateToken(ctx, t)
				if err != nil {
					return err
				}
				out := newTable("TOKEN_ID", "TENANT", "ROLES", "TOKEN")
				out.add(res.Id, t.Tenant, strings.Join(t.Roles, ","), res.Token)
				return a.print(out)
			})
		},
	}
	c.Flags().StringSliceVar(&t.Roles, "role", nil, "what it may do: produce, consume, admin (all of its tenant), operator (everything)")
	c.Flags().StringVar(&t.Name, "name", "", "what it is for")
	return c
}

func tokenList(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "show the tokens; their secrets are kept nowhere",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error {
				ts, err := c.ListTokens(ctx)
				if err != nil {
					return err
				}
				out := newTable("TOKEN_ID", "TENANT", "ROLES", "NAME")
				for _, t := range ts {
					out.add(t.Id, t.Tenant, strings.Join(t.Roles, ","), t.Name)
				}
				return a.print(out)
			})
		},
	}
}

func tokenRevoke(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "revoke TOKEN_ID",
		Short: "end a token",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := strconv.ParseUint(args[0], 10, 64)
			if err != nil || id == 0 {
				return usagef("token %q: it is a number, as `tierq token list` shows", args[0])
			}
			return a.withClient(cmd.Context(), func(ctx context.Context, c *client.Client) error { return c.RevokeToken(ctx, id) })
		},
	}
}

func tokenGenerate(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "generate",
		Short: "print a random token for a host's auth.operator_token_file",
		Long:  "Print a random token. It means nothing to a fleet until a host's configuration names a file that holds it: its bearer is an\noperator then, and makes the other tokens.",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(a.out, node.NewOperatorToken())
			return err
		},
	}
}

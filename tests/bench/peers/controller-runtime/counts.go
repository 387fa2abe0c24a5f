package main

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"sync/atomic"

	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// counts is what the controllers did, over all of them.
type counts struct {
	reconciles atomic.Uint64
	errors     atomic.Uint64
	synced     atomic.Bool
}

// of counts the calls of a reconciler.
func (c *counts) of(inner reconcile.Reconciler) reconcile.Reconciler {
	return reconcile.Func(func(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
		c.reconciles.Add(1)
		result, err := inner.Reconcile(ctx, request)
		if err != nil {
			c.errors.Add(1)
		}
		return result, err
	})
}

// serve answers GET /count from now on.
func (c *counts) serve(address string) error {
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /count", func(writer http.ResponseWriter, _ *http.Request) {
		writer.Header().Set("Content-Type", "application/json")
		// An error means that the client is gone.
		_ = json.NewEncoder(writer).Encode(map[string]any{
			"reconciles": c.reconciles.Load(),
			"errors":     c.errors.Load(),
			"synced":     c.synced.Load(),
		})
	})
	go func() { _ = http.Serve(listener, mux) }()
	return nil
}

// The handlers of Berth's plugins as an operator of controller-runtime. The README.md beside this folder has the environment variables.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

func main() {
	ctrl.SetLogger(zap.New())
	if err := run(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	concurrency, err := number("CONCURRENCY", 16)
	if err != nil {
		return err
	}
	seconds, err := number("RESYNC_SECONDS", 600)
	if err != nil {
		return err
	}
	namespace, err := required("WATCH_NAMESPACE")
	if err != nil {
		return err
	}
	address, err := required("COUNT_ADDRESS")
	if err != nil {
		return err
	}
	kinds, err := required("KINDS")
	if err != nil {
		return err
	}

	kubeconfig, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	// No limit at the client.
	kubeconfig.QPS = -1
	scheme := runtime.NewScheme()
	if err := addToScheme(scheme); err != nil {
		return err
	}
	resync := time.Duration(seconds) * time.Second
	mgr, err := ctrl.NewManager(kubeconfig, ctrl.Options{
		Scheme:         scheme,
		LeaderElection: false,
		Metrics:        metricsserver.Options{BindAddress: "0"},
		Cache: cache.Options{
			DefaultNamespaces: map[string]cache.Config{namespace: {}},
			SyncPeriod:        &resync,
		},
		Controller: config.Controller{MaxConcurrentReconciles: concurrency},
	})
	if err != nil {
		return err
	}

	counts := &counts{}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.Proxy = nil
	transport.MaxIdleConns = 0
	transport.MaxIdleConnsPerHost = 256
	backend := &http.Client{Transport: transport, Timeout: 30 * time.Second}
	var watched []client.Object
	for kind := range strings.SplitSeq(kinds, ",") {
		switch strings.TrimSpace(kind) {
		case "email":
			gateway, err := required("GATEWAY")
			if err != nil {
				return err
			}
			mailer := &mailer{Client: mgr.GetClient(), http: backend, gateway: gateway}
			if err := ctrl.NewControllerManagedBy(mgr).For(&EmailRequest{}).Complete(counts.of(mailer)); err != nil {
				return err
			}
			watched = append(watched, &EmailRequest{})
		case "report":
			base, err := required("EXPORTER")
			if err != nil {
				return err
			}
			exporter := &exporter{Client: mgr.GetClient(), http: backend, exporter: base, counts: counts, pauses: map[client.ObjectKey]pause{}}
			if err := ctrl.NewControllerManagedBy(mgr).For(&ReportJob{}).Complete(counts.of(exporter)); err != nil {
				return err
			}
			watched = append(watched, &ReportJob{})
		default:
			return fmt.Errorf("KINDS: there is no %q here", kind)
		}
	}

	// Runs once the cache does; each informer is waited for.
	if err := mgr.Add(manager.RunnableFunc(func(ctx context.Context) error {
		for _, object := range watched {
			if _, err := mgr.GetCache().GetInformer(ctx, object); err != nil {
				return err
			}
		}
		counts.synced.Store(true)
		return nil
	})); err != nil {
		return err
	}
	if err := counts.serve(address); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

func required(name string) (string, error) {
	if value := os.Getenv(name); value != "" {
		return value, nil
	}
	return "", errors.New(name + " is not set")
}

func number(name string, otherwise int) (int, error) {
	value := os.Getenv(name)
	if value == "" {
		return otherwise, nil
	}
	parsed, err := strconv.Atoi(value)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return parsed, nil
}

package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

const (
	// phaseLabel mirrors the phase.
	phaseLabel = "workqueue.acme.io/phase"
	// attempts is the failure that is the last one.
	attempts = 5
)

// exporter has reports exported.
type exporter struct {
	client.Client
	http     *http.Client
	exporter string
	counts   *counts

	mutex  sync.Mutex
	pauses map[client.ObjectKey]pause
}

// pause is until when this version of an object waits after a failure.
type pause struct {
	uid        string
	generation int64
	until      time.Time
}

// Reconcile has the report exported unless that is done, or given up, for this version of the spec.
func (r *exporter) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	var job ReportJob
	if err := r.Get(ctx, request.NamespacedName, &job); err != nil {
		if apierrors.IsNotFound(err) {
			r.forget(request.NamespacedName)
		}
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	settled := job.Status.Phase == phaseDone || job.Status.Phase == phaseFailed
	if settled && job.Status.ObservedGeneration == job.Generation {
		return reconcile.Result{}, nil
	}
	if job.Spec.NotBefore != nil {
		if wait := time.Until(job.Spec.NotBefore.Time); wait > 0 {
			return reconcile.Result{RequeueAfter: wait}, nil
		}
	}
	// The write of a failure to the status comes back at once as an event: it still has to wait.
	if wait := r.left(&job); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}

	before := job.DeepCopy()
	var retries int64
	// The failures of a former version of the spec do not count.
	if job.Status.Retries != nil && !settled {
		retries = *job.Status.Retries
	}
	address, err := r.export(ctx, &job)
	if err == nil {
		r.forget(request.NamespacedName)
		job.Status.Phase = phaseDone
		job.Status.URL = address
		job.Status.Message = ""
		if job.Status.Retries != nil {
			job.Status.Retries = new(int64)
		}
		job.Status.ObservedGeneration = job.Generation
		return reconcile.Result{}, r.write(ctx, before, &job, "done")
	}

	log.FromContext(ctx).Error(err, "not exported")
	retries++
	job.Status.Retries = &retries
	job.Status.Message = err.Error()
	if retries >= attempts {
		r.forget(request.NamespacedName)
		job.Status.Phase = phaseFailed
		job.Status.ObservedGeneration = job.Generation
		return reconcile.Result{}, r.write(ctx, before, &job, "failed")
	}
	job.Status.Phase = phasePending
	wait := time.Second << (retries - 1)
	r.pause(&job, wait)
	if err := r.write(ctx, before, &job, ""); err != nil {
		return reconcile.Result{}, err
	}
	r.counts.errors.Add(1)
	return reconcile.Result{RequeueAfter: wait}, nil
}

// export returns where the report is.
func (r *exporter) export(ctx context.Context, job *ReportJob) (string, error) {
	key := url.PathEscape(idempotencyKey("reportjobs.batch.acme.io", job))
	answer, err := send(ctx, r.http, http.MethodPut, strings.TrimRight(r.exporter, "/")+"/reports/"+key, nil, job.Spec)
	if err != nil {
		return "", err
	}
	var exported struct {
		URL string `json:"url"`
	}
	if err := json.Unmarshal(answer, &exported); err != nil {
		return "", err
	}
	return exported.URL, nil
}

// write patches the status with the resourceVersion that it was computed from, and then the label, if one is given.
func (r *exporter) write(ctx context.Context, before, job *ReportJob, label string) error {
	patch := client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})
	if err := r.Status().Patch(ctx, job, patch); err != nil || label == "" {
		return err
	}
	patch = client.MergeFrom(job.DeepCopy())
	if job.Labels == nil {
		job.Labels = map[string]string{}
	}
	job.Labels[phaseLabel] = label
	return r.Patch(ctx, job, patch)
}

func (r *exporter) left(job *ReportJob) time.Duration {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	pause := r.pauses[client.ObjectKeyFromObject(job)]
	if pause.uid != string(job.UID) || pause.generation != job.Generation {
		return 0
	}
	return time.Until(pause.until)
}

func (r *exporter) pause(job *ReportJob, wait time.Duration) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.pauses[client.ObjectKeyFromObject(job)] = pause{string(job.UID), job.Generation, time.Now().Add(wait)}
}

func (r *exporter) forget(key client.ObjectKey) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	delete(r.pauses, key)
}

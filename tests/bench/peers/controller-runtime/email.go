package main

import (
	"context"
	"net/http"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// mailer sends mails through the mail gateway.
type mailer struct {
	client.Client
	http    *http.Client
	gateway string
}

// Reconcile sends the mail unless that is done for this version of the spec.
func (r *mailer) Reconcile(ctx context.Context, request reconcile.Request) (reconcile.Result, error) {
	var mail EmailRequest
	if err := r.Get(ctx, request.NamespacedName, &mail); err != nil {
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if mail.Status.ObservedGeneration == mail.Generation {
		return reconcile.Result{}, nil
	}
	header := http.Header{}
	header.Set("Idempotency-Key", `"`+idempotencyKey("emailrequests.notify.acme.io", &mail)+`"`)
	if _, err := send(ctx, r.http, http.MethodPost, strings.TrimRight(r.gateway, "/")+"/send", header, mail.Spec); err != nil {
		return reconcile.Result{}, err
	}

	// The patch carries the resourceVersion.
	patch := client.MergeFromWithOptions(mail.DeepCopy(), client.MergeFromWithOptimisticLock{})
	mail.Status.Phase = "Sent"
	mail.Status.ObservedGeneration = mail.Generation
	meta.SetStatusCondition(&mail.Status.Conditions, metav1.Condition{
		Type:               "Sent",
		Status:             metav1.ConditionTrue,
		Reason:             "Delivered",
		Message:            "the gateway has taken the mail",
		ObservedGeneration: mail.Generation,
	})
	return reconcile.Result{}, r.Status().Patch(ctx, &mail, patch)
}

package main

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var (
	notify = schema.GroupVersion{Group: "notify.acme.io", Version: "v1"}
	batch  = schema.GroupVersion{Group: "batch.acme.io", Version: "v1"}
)

func addToScheme(scheme *runtime.Scheme) error {
	builder := runtime.NewSchemeBuilder(func(scheme *runtime.Scheme) error {
		scheme.AddKnownTypes(notify, &EmailRequest{}, &EmailRequestList{})
		scheme.AddKnownTypes(batch, &ReportJob{}, &ReportJobList{})
		metav1.AddToGroupVersion(scheme, notify)
		metav1.AddToGroupVersion(scheme, batch)
		return nil
	})
	return builder.AddToScheme(scheme)
}

// EmailRequest asks for one mail, sent once.
type EmailRequest struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   EmailSpec   `json:"spec"`
	Status EmailStatus `json:"status,omitempty"`
}

// EmailSpec is what to send.
type EmailSpec struct {
	To       string `json:"to"`
	Template string `json:"template"`
	Locale   string `json:"locale"`
}

// EmailStatus is what became of the mail.
type EmailStatus struct {
	Phase              string             `json:"phase,omitempty"`
	ObservedGeneration int64              `json:"observedGeneration,omitempty"`
	Message            string             `json:"message,omitempty"`
	Conditions         []metav1.Condition `json:"conditions,omitempty"`
}

// EmailRequestList is a list of them.
type EmailRequestList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []EmailRequest `json:"items"`
}

// DeepCopyInto copies into out.
func (in *EmailRequest) DeepCopyInto(out *EmailRequest) {
	*out = *in
	in.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	out.Status.Conditions = nil
	if in.Status.Conditions != nil {
		out.Status.Conditions = make([]metav1.Condition, len(in.Status.Conditions))
		for i := range in.Status.Conditions {
			in.Status.Conditions[i].DeepCopyInto(&out.Status.Conditions[i])
		}
	}
}

// DeepCopy copies.
func (in *EmailRequest) DeepCopy() *EmailRequest {
	out := new(EmailRequest)
	in.DeepCopyInto(out)
	return out
}

// DeepCopyObject copies.
func (in *EmailRequest) DeepCopyObject() runtime.Object {
	return in.DeepCopy()
}

// DeepCopyObject copies.
func (in *EmailRequestList) DeepCopyObject() runtime.Object {
	out := &EmailRequestList{TypeMeta: in.TypeMeta}
	in.ListMeta.DeepCopyInto(&out.ListMeta)
	if in.Items != nil {
		out.Items = make([]EmailRequest, len(in.Items))
		for i := range in.Items {
			in.Items[i].DeepCopyInto(&out.Items[i])
		}
	}
	return out
}

// The phases of a ReportJob.
const (
	phasePending = "Pending"
	phaseDone    = "Done"
	phaseFailed  = "Failed"
)

// ReportJob asks for one report.
type ReportJob struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   JobSpec   `json:"spec"`
	Status JobStatus `json:"status,omitempty"`
}

// JobSpec is what to export.
type JobSpec struct {
	Report    string       `json:"report"`
	Format    string       `json:"format"`
	Priority  int64        `json:"priority"`
	NotBefore *metav1.Time `json:"notBefore,omitempty"`
}

// JobStatus is what became of the report.
type JobStatus struct {
	Phase              string `json:"phase,omitempty"`
	Retries            *int64 `json:"retries,omitempty"`
	Message            string `json:"message,omitempty"`
	URL                string `json:"url,omitempty"`
	ObservedGeneration int64  `json:"observedGeneration,omitempty"`
}

// ReportJobList is a list of them.
type ReportJobList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`

	Items []ReportJob `json:"items"`
}

// DeepCopyInto copies into out.
func (in *ReportJob) DeepCopyInto(out *ReportJob) {
	*out = *in
	in.ObjectMeta.DeepCopyInto(&out.ObjectMeta)
	if in.Spec.NotBefore != nil {
		out.Spec.NotBefore = in.Spec.NotBefore.DeepCopy()
	}
	if in.Status.Retries != nil {
		out.Status.Retries = new(*in.Status.Retries)
	}
}

// DeepCopy copies.
func (in *ReportJob) DeepCopy() *ReportJob {
	out := new(ReportJob)
	in.DeepCopyInto(out)
	return out
}

// DeepCopyObject copies.
func (in *ReportJob) DeepCopyObject() runtime.Object {
	return in.DeepCopy()
}

// DeepCopyObject copies.
func (in *ReportJobList) DeepCopyObject() runtime.Object {
	out := &ReportJobList{TypeMeta: in.TypeMeta}
	in.ListMeta.DeepCopyInto(&out.ListMeta)
	if in.Items != nil {
		out.Items = make([]ReportJob, len(in.Items))
		for i := range in.Items {
			in.Items[i].DeepCopyInto(&out.Items[i])
		}
	}
	return out
}

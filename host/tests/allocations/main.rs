//! What the hot paths allocate, counted: a guard where a time would depend on the machine.
#![allow(missing_docs, reason = "tests")]

use allocation_counter::{AllocationInfo, measure};
use berth_host::object::Object;
use serde_json::json;

/// An object as the API server sends it, of about so many bytes without `managedFields`.
fn sent(size: usize) -> String {
    let fields =
        json!({"f:spec": {"f:to": {}, "f:template": {}, "f:locale": {}}, "f:metadata": {"f:annotations": {".": {}, "f:note": {}}}});
    json!({
        "apiVersion": "notify.acme.io/v1",
        "kind": "EmailRequest",
        "metadata": {
            "name": "welcome-42", "namespace": "shop", "uid": "5b9a0f6e-9a07-4a2e-9a5c-0d8a0f1f9c11", "resourceVersion": "123456",
            "generation": 1, "creationTimestamp": "2026-11-29T12:00:00Z", "annotations": {"note": "x".repeat(size.saturating_sub(420))},
            "managedFields": [{"manager": "kubectl", "operation": "Apply", "apiVersion": "notify.acme.io/v1", "fieldsType": "FieldsV1", "fieldsV1": fields}],
        },
        "spec": {"to": "a@example.com", "template": "welcome", "locale": "en-GB"},
        "status": {"phase": "Sent", "observedGeneration": 1},
    })
    .to_string()
}

#[test]
fn a_cached_object_takes_little_more_than_its_text() {
    for size in [500, 2_400, 10_000] {
        let text = sent(size);
        let mut object = None;
        let AllocationInfo { bytes_current: kept, count_total: allocations, .. } =
            measure(|| object = Some(Object::parse(&text).expect("an object")));
        let json = object.expect("parsed").json.len();
        let most = i64::try_from(json + json / 10 + 400).expect("small");
        assert!(kept <= most, "{kept} bytes are kept of an object of {json} bytes; at most {most}");
        // Not one for each field of the object: what is not needed parsed stays text.
        assert!(allocations <= 20, "{allocations} allocations for an object of {json} bytes");
    }
}

//! Judges a claim: what Kubernetes or the host could not honour is refused when the plugin is loaded, not at its first run.

use std::collections::BTreeSet;

use crate::{
    claim::{Claim, DeadLetter, Progress, Read},
    label::{self, Selector, is_dns_label, is_subdomain},
    object::Kind,
    package::{HostPattern, Refusal, reason},
};

/// Most entries of a list in a claim: beyond, somebody means harm.
const ENTRIES: usize = 64;

/// Checks everything that can be known without the cluster.
pub fn check(claim: &Claim) -> Result<(), Refusal> {
    judge(claim).map_err(|what| Refusal::new(reason::INVALID_CLAIM, format!("The claim of the handler is not valid: {what}.")))
}

fn judge(claim: &Claim) -> Result<(), String> {
    let Claim { reconciles, progress, dead_letter, priority_field, reads, owns, hosts, finalizer: _, label_prefixes, sdk: _ } = claim;
    kind(reconciles)?;
    let mut status_fields = BTreeSet::from(["status.observedGeneration"]);
    if let Some(progress) = progress {
        self::progress(progress, &mut status_fields)?;
    }
    if let Some(letter) = dead_letter {
        self::dead_letter(letter, progress.as_ref(), &mut status_fields)?;
    }
    if let Some(field) = priority_field {
        path("priority-field", field, "spec.")?;
    }
    for (name, entries) in [("hosts", hosts.len()), ("label-prefixes", label_prefixes.len()), ("reads", reads.len())] {
        if entries > ENTRIES {
            return Err(format!("`{name}` has {entries} entries, more than the {ENTRIES} that it may have"));
        }
    }
    reads.iter().enumerate().try_for_each(|(place, read)| self::read(read, reconciles, &reads[..place]))?;
    self::owns(owns, reconciles)?;
    hosts.iter().try_for_each(|host| self::host(host))?;
    label_prefixes.iter().try_for_each(|prefix| self::prefix(prefix))
}

fn kind(kind: &Kind) -> Result<(), String> {
    let group = &kind.group;
    if !is_subdomain(group) || !group.contains('.') {
        return Err(format!("{group:?} is no group of a CustomResourceDefinition, such as notify.acme.io"));
    }
    any_kind(kind)
}

/// The kinds of the children: of any group, Kubernetes' own included.
fn owns(owns: &[Kind], reconciles: &Kind) -> Result<(), String> {
    if owns.len() > ENTRIES {
        return Err(format!("`owns` has {} entries, more than the {ENTRIES} that it may have", owns.len()));
    }
    let mut seen = BTreeSet::new();
    for kind in owns {
        any_kind(kind).map_err(|what| format!("`owns`: {what}"))?;
        if !kind.group.is_empty() && !is_subdomain(&kind.group) {
            return Err(format!("`owns`: {:?} is no API group", kind.group));
        }
        if !seen.insert(kind.group_kind()) {
            return Err(format!("`owns` names {} twice", kind.group_kind()));
        }
        if kind.group_kind() == reconciles.group_kind() {
            return Err(format!(
                "`owns` names {}, which the plugin reconciles: each would bring forth the next, without an end",
                kind.group_kind()
            ));
        }
        if reconciles.namespaced && !kind.namespaced {
            return Err(format!(
                "`owns` names {}, which is cluster-scoped: it would stay when its owner, which is in a namespace, goes",
                kind.group_kind()
            ));
        }
    }
    Ok(())
}

fn any_kind(kind: &Kind) -> Result<(), String> {
    let Kind { group, version, kind, plural, namespaced: _ } = kind;
    if group == "berth.acme.io" || group.ends_with(".berth.acme.io") {
        return Err(format!("the group {group:?} is the host's own"));
    }
    names(version, kind, plural)
}

/// A kind may be of the core group, or of one without a dot such as `apps`; one entry says all that is read of it.
fn read(read: &Read, reconciles: &Kind, before: &[Read]) -> Result<(), String> {
    let Read { kind, all_namespaces, label_selector } = read;
    let of = |what: String| format!("`reads` has {kind}: {what}");
    if !kind.group.is_empty() && !is_subdomain(&kind.group) {
        return Err(of(format!("{:?} is no API group", kind.group)));
    }
    names(&kind.version, &kind.kind, &kind.plural).map_err(of)?;
    if !kind.namespaced && !all_namespaces {
        return Err(of("its objects have no namespace, so its reach has to be `all-namespaces`".into()));
    }
    if !reconciles.namespaced && !all_namespaces {
        return Err(of(format!("a {reconciles} has no namespace, so its reach has to be `all-namespaces`")));
    }
    label_selector.parse::<Selector>().map_err(|error| of(error.to_string()))?;
    if before.iter().any(|other| other.kind.group_kind() == kind.group_kind()) {
        return Err(of("it is there already; one entry has to say all that is read of a kind".into()));
    }
    Ok(())
}

fn names(version: &str, kind: &str, plural: &str) -> Result<(), String> {
    if !is_dns_label(version) || !version.starts_with('v') {
        return Err(format!("{version:?} is no API version, such as v1"));
    }
    if kind.len() > 63 || !kind.starts_with(|c: char| c.is_ascii_uppercase()) || !kind.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(format!("{kind:?} is no kind, such as EmailRequest"));
    }
    if !is_dns_label(plural) || plural.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(format!("{plural:?} is no plural resource name, such as emailrequests"));
    }
    Ok(())
}

fn progress<'c>(progress: &'c Progress, fields: &mut BTreeSet<&'c str>) -> Result<(), String> {
    let Progress { phase_field, settled, mirror_label } = progress;
    status_field("progress.phase-field", phase_field, fields)?;
    if settled.is_empty() || settled.len() > ENTRIES {
        return Err(format!("`progress.settled` has to name 1 to {ENTRIES} phases"));
    }
    if settled.iter().collect::<BTreeSet<_>>().len() != settled.len() {
        return Err("`progress.settled` names a phase twice".into());
    }
    if let Some(phase) = settled.iter().find(|phase| phase.is_empty() || phase.len() > 63) {
        return Err(format!("`progress.settled` has the phase {phase:?}, which has to have 1 to 63 characters"));
    }
    let Some(label) = mirror_label else { return Ok(()) };
    if !label::is_key(label) || reserved(label) {
        return Err(format!("`progress.mirror-label` {label:?} is no key that a label of yours may have, such as workqueue.acme.io/phase"));
    }
    match settled.iter().find(|phase| !label::is_value(&phase.to_lowercase())) {
        Some(phase) => Err(format!("the phase {phase:?} cannot be the value of a label, which `progress.mirror-label` needs")),
        None => Ok(()),
    }
}

fn dead_letter<'c>(letter: &'c DeadLetter, progress: Option<&Progress>, fields: &mut BTreeSet<&'c str>) -> Result<(), String> {
    let DeadLetter { after, phase, retries_field, message_field } = letter;
    let Some(progress) = progress else {
        return Err("`dead-letter` needs `progress`: its phase has to be one that settles an object".into());
    };
    if !progress.settled.contains(phase) {
        return Err(format!("`dead-letter.phase` {phase:?} is not one of `progress.settled`"));
    }
    status_field("dead-letter.message-field", message_field, fields)?;
    if let Some(field) = retries_field {
        status_field("dead-letter.retries-field", field, fields)?;
    }
    match (after, retries_field) {
        (Some(0), _) => Err("`dead-letter.after` is 0: the first failure is number 1".into()),
        (Some(_), None) => Err("`dead-letter.after` needs `retries-field`, where the failures are counted".into()),
        _ => Ok(()),
    }
}

fn status_field<'c>(name: &str, field: &'c str, fields: &mut BTreeSet<&'c str>) -> Result<(), String> {
    path(name, field, "status.")?;
    if fields.insert(field) { Ok(()) } else { Err(format!("`{name}` is {field}, which already has another use")) }
}

fn path(name: &str, field: &str, start: &str) -> Result<(), String> {
    let segment =
        |segment: &str| !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-');
    match field.strip_prefix(start) {
        Some(rest) if field.len() <= 253 && rest.split('.').all(segment) => Ok(()),
        Some(_) => Err(format!("`{name}` {field:?} is no path of field names")),
        None => Err(format!("`{name}` {field:?} has to start with {start:?}")),
    }
}

fn host(host: &str) -> Result<(), String> {
    match host.strip_prefix("$settings.") {
        Some(key) if key.is_empty() || key.len() > 253 => Err(format!("`hosts` has {host:?}, which names no key of the settings")),
        Some(_) => Ok(()),
        None => HostPattern::of_url(host).map(drop).map_err(|error| format!("`hosts` has {host:?}, which {error}")),
    }
}

fn prefix(prefix: &str) -> Result<(), String> {
    let domain =
        prefix.split_once('/').map(|(domain, rest)| (domain, rest.is_empty() || label::is_name(rest.trim_end_matches(['-', '_', '.']))));
    match domain {
        Some((domain, true)) if is_subdomain(domain) && !reserved(prefix) => Ok(()),
        Some((domain, _)) if is_subdomain(domain) && reserved(prefix) => {
            Err(format!("`label-prefixes` has {prefix:?}, which belongs to Kubernetes or to Berth"))
        }
        _ => Err(format!("`label-prefixes` has {prefix:?}, which is no prefix of label keys, such as acme.io/")),
    }
}

/// Label domains that handlers have no business in.
fn reserved(key: &str) -> bool {
    let domain = key.split('/').next().unwrap_or_default();
    ["kubernetes.io", "k8s.io", "berth.acme.io"]
        .iter()
        .any(|own| domain.strip_suffix(own).is_some_and(|rest| rest.is_empty() || rest.ends_with('.')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(kind: &str, plural: &str) -> Read {
        let (kind, plural) = (kind.to_owned(), plural.to_owned());
        let kind = Kind { group: String::new(), version: "v1".into(), kind, plural, namespaced: true };
        Read { kind, all_namespaces: false, label_selector: "app in (a, b)".into() }
    }

    fn full() -> Claim {
        let reads = vec![reads("ConfigMap", "configmaps"), reads("Secret", "secrets")];
        Claim { reads, hosts: vec!["$settings.exporter".into(), "https://a.io/x".into(), "https://*.a.io".into()], ..Claim::full() }
    }

    #[test]
    fn a_full_claim_and_a_plain_one_are_valid() {
        assert_eq!(check(&full()), Ok(()));
        assert_eq!(check(&Claim::plain()), Ok(()));
    }

    #[test]
    fn each_fault_is_refused_with_its_name() {
        type Fault = fn(&mut Claim);
        let faults: &[(Fault, &str)] = &[
            (|claim| claim.reconciles.group = String::new(), "no group"),
            (|claim| claim.reconciles.group = "Acme.io".into(), "no group"),
            (|claim| claim.reconciles.group = "x.berth.acme.io".into(), "the host's own"),
            (|claim| claim.reconciles.version = "1".into(), "no API version"),
            (|claim| claim.reconciles.version = "v1/x".into(), "no API version"),
            (|claim| claim.reconciles.kind = "email".into(), "no kind"),
            (|claim| claim.reconciles.plural = "e/../secrets".into(), "no plural"),
            (|claim| progress(claim).phase_field = "spec.phase".into(), "has to start with \"status.\""),
            (|claim| progress(claim).phase_field = "status.".into(), "no path"),
            (|claim| progress(claim).phase_field = "status.observedGeneration".into(), "another use"),
            (|claim| progress(claim).settled = Vec::new(), "1 to 64 phases"),
            (|claim| progress(claim).settled.push("Done".into()), "twice"),
            (|claim| progress(claim).settled.push("Done with warnings".into()), "value of a label"),
            (|claim| progress(claim).mirror_label = Some("a b".into()), "mirror-label"),
            (|claim| progress(claim).mirror_label = Some("app.kubernetes.io/name".into()), "mirror-label"),
            (|claim| claim.progress = None, "needs `progress`"),
            (|claim| letter(claim).phase = "Dead".into(), "not one of `progress.settled`"),
            (|claim| letter(claim).after = Some(0), "is 0"),
            (|claim| letter(claim).retries_field = None, "needs `retries-field`"),
            (|claim| letter(claim).message_field = "status.phase".into(), "another use"),
            (|claim| claim.priority_field = Some("metadata.name".into()), "has to start with \"spec.\""),
            (|claim| claim.owns = vec![owned("", "Config Map", true)], "no kind"),
            (|claim| claim.owns = vec![owned("a/../b", "Job", true)], "no API group"),
            (|claim| claim.owns = vec![owned("berth.acme.io", "Plugin", true)], "the host's own"),
            (|claim| claim.owns = vec![owned("", "Node", false)], "cluster-scoped"),
            (|claim| claim.owns = vec![owned("", "Pod", true), owned("", "Pod", true)], "twice"),
            (|claim| claim.hosts = vec!["mail".into()], "has to start with http"),
            (|claim| claim.hosts = vec!["https://*.io".into()], "wildcard in the wrong place"),
            (|claim| claim.hosts = vec!["$settings.".into()], "no key"),
            (|claim| claim.hosts = vec!["https://a".into(); 65], "65 entries"),
            (|claim| claim.reads[1].kind.group = "No".into(), "\"No\" is no API group"),
            (|claim| claim.reads[1].kind.plural = "a/b".into(), "no plural"),
            (|claim| claim.reads[1].kind.namespaced = false, "has to be `all-namespaces`"),
            (|claim| claim.reconciles.namespaced = false, "has no namespace, so"),
            (|claim| claim.reads[1].label_selector = "a in b".into(), "is not valid"),
            (|claim| claim.reads[1].kind = claim.reads[0].kind.clone(), "there already"),
            (|claim| claim.reads = vec![claim.reads[0].clone(); 65], "65 entries"),
            (|claim| claim.label_prefixes = vec!["".into()], "no prefix"),
            (|claim| claim.label_prefixes = vec!["acme".into()], "no prefix"),
            (|claim| claim.label_prefixes = vec!["kubernetes.io/".into()], "belongs to Kubernetes"),
        ];
        for (fault, words) in faults {
            let mut claim = full();
            fault(&mut claim);
            let refusal = check(&claim).expect_err(words);
            assert!(refusal.reason == reason::INVALID_CLAIM && refusal.message.contains(words), "{words}: {refusal}");
        }
    }

    fn owned(group: &str, kind: &str, namespaced: bool) -> Kind {
        Kind { group: group.into(), version: "v1".into(), kind: kind.into(), plural: format!("{}s", kind.to_lowercase()), namespaced }
    }

    #[test]
    fn children_may_be_of_kubernetes_own_kinds_and_a_finalizer_may_be_claimed() {
        let claim =
            Claim { owns: vec![owned("", "ConfigMap", true), owned("apps", "Deployment", true)], finalizer: true, ..Claim::plain() };
        assert_eq!(check(&claim), Ok(()));
    }

    fn progress(claim: &mut Claim) -> &mut Progress {
        claim.progress.as_mut().expect("full")
    }

    fn letter(claim: &mut Claim) -> &mut DeadLetter {
        claim.dead_letter.as_mut().expect("full")
    }
}

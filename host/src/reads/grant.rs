//! Whether a claim covers a read: the kind, and how far it reaches.

use super::{Query, ReadError, Target};
use crate::{
    claim::{Claim, Read},
    text::cut,
};

/// The longest name of an object, and of a namespace, in bytes:
/// <https://kubernetes.io/docs/concepts/overview/working-with-objects/names/>.
const NAME: usize = 253;
const NAMESPACE: usize = 63;

/// The read of the claim that covers an object, for a run in the namespace `home`.
pub fn of_get<'c>(claim: &'c Claim, home: Option<&str>, target: &Target) -> Result<&'c Read, ReadError> {
    let Target { group, version, kind, key } = target;
    let read = claimed(claim, group, version, kind)?;
    let namespace = key.namespace.as_deref();
    name("name", &key.name, NAME)?;
    name("namespace", namespace.unwrap_or("-"), NAMESPACE)?;
    match (read.kind.namespaced, namespace) {
        (true, None) => Err(ReadError::Other(format!("a {} has a namespace: name it", read.kind))),
        (true, Some(_)) => reaches(read, home, namespace).map(|()| read),
        (false, _) => in_no_namespace(read, namespace).map(|()| read),
    }
}

/// The read of the claim that covers a list.
pub fn of_list<'c>(claim: &'c Claim, home: Option<&str>, query: &Query) -> Result<&'c Read, ReadError> {
    let read = claimed(claim, &query.kind.group, &query.kind.version, &query.kind.kind)?;
    let namespace = query.namespace.as_deref();
    name("namespace", namespace.unwrap_or("-"), NAMESPACE)?;
    let covered = if read.kind.namespaced { reaches(read, home, namespace) } else { in_no_namespace(read, namespace) };
    covered.map(|()| read)
}

/// A name that no object can have is read in vain, and what was read in vain is remembered and asked about: so it is refused first.
fn name(what: &str, name: &str, longest: usize) -> Result<(), ReadError> {
    let shown = || cut(name, 100);
    match name.len() {
        0 => Err(ReadError::Other(format!("a {what} is empty"))),
        length if length > longest => {
            Err(ReadError::Other(format!("the {what} {:?} has {length} bytes, and the longest is {longest}", shown())))
        }
        _ if name.contains('/') || name.contains('%') || name.chars().any(char::is_control) => {
            Err(ReadError::Other(format!("the {what} {:?} is none that an object can have", shown())))
        }
        _ => Ok(()),
    }
}

fn claimed<'c>(claim: &'c Claim, group: &str, version: &str, kind: &str) -> Result<&'c Read, ReadError> {
    let of_kind = claim.reads.iter().find(|read| read.kind.group == group && read.kind.kind == kind);
    match of_kind {
        Some(read) if read.kind.version == version => Ok(read),
        Some(read) => {
            Err(ReadError::Forbidden(format!("the handler claims to read {}, and not its version {:?}", read.kind, cut(version, 100))))
        }
        None => {
            let (kind, group, version) = (cut(kind, 100), cut(group, 100), cut(version, 100));
            let place = if group.is_empty() { version } else { format!("{group}/{version}") };
            Err(ReadError::Forbidden(format!(
                "the handler does not claim to read {kind} ({place}): add it to the `reads` of its claim, in Rust by `read({kind})` in \
                 #[reconciler]"
            )))
        }
    }
}

fn reaches(read: &Read, home: Option<&str>, namespace: Option<&str>) -> Result<(), ReadError> {
    if read.all_namespaces || (namespace.is_some() && namespace == home) {
        return Ok(());
    }
    let elsewhere = namespace.map_or_else(|| "all namespaces".to_owned(), |namespace| format!("the namespace {namespace:?}"));
    Err(ReadError::Forbidden(format!(
        "the handler claims to read {} in the namespace of its object alone ({:?}), and not in {elsewhere}: claim it with the reach \
         `all-namespaces`, in Rust by `read({}, all_namespaces)` in #[reconciler]",
        read.kind,
        home.unwrap_or_default(),
        read.kind.kind
    )))
}

fn in_no_namespace(read: &Read, namespace: Option<&str>) -> Result<(), ReadError> {
    match namespace {
        None => Ok(()),
        Some(_) => Err(ReadError::Other(format!("a {} has no namespace: name none", read.kind))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{Kind, ObjectKey};

    fn kind(kind: &str, plural: &str, namespaced: bool) -> Kind {
        Kind { group: String::new(), version: "v1".into(), kind: kind.into(), plural: plural.into(), namespaced }
    }

    fn claim() -> Claim {
        let read = |kind, all_namespaces| Read { kind, all_namespaces, label_selector: String::new() };
        let reads = vec![
            read(kind("ConfigMap", "configmaps", true), false),
            read(kind("Pod", "pods", true), true),
            read(kind("Node", "nodes", false), true),
        ];
        Claim { reads, ..Claim::plain() }
    }

    fn get(version: &str, kind: &str, namespace: Option<&str>) -> Result<(), ReadError> {
        let target = Target { group: String::new(), version: version.into(), kind: kind.into(), key: ObjectKey::new(namespace, "x") };
        of_get(&claim(), Some("home"), &target).map(drop)
    }

    fn list(kind: Kind, namespace: Option<&str>) -> Result<(), ReadError> {
        let namespace = namespace.map(str::to_owned);
        let query = Query { kind, namespace, label_selector: String::new(), limit: 0, after: None };
        of_list(&claim(), Some("home"), &query).map(drop)
    }

    #[test]
    fn what_is_claimed_within_its_reach_is_covered() {
        assert_eq!(get("v1", "ConfigMap", Some("home")), Ok(()));
        assert_eq!(get("v1", "Pod", Some("other")), Ok(()));
        assert_eq!(get("v1", "Node", None), Ok(()));
        assert_eq!(list(kind("ConfigMap", "configmaps", true), Some("home")), Ok(()));
        assert_eq!(list(kind("Pod", "pods", true), None), Ok(()));
        assert_eq!(list(kind("Node", "nodes", false), None), Ok(()));
    }

    #[test]
    fn everything_else_is_forbidden_with_what_to_add() {
        let forbidden = |result: Result<(), ReadError>, words: &str| {
            assert!(matches!(&result, Err(ReadError::Forbidden(why)) if why.contains(words)), "{result:?}");
        };
        forbidden(get("v1", "Secret", Some("home")), "add it to the `reads` of its claim, in Rust by `read(Secret)`");
        forbidden(get("v2", "ConfigMap", Some("home")), "not its version \"v2\"");
        forbidden(get("v1", "ConfigMap", Some("other")), "not in the namespace \"other\"");
        forbidden(list(kind("ConfigMap", "configmaps", true), None), "not in all namespaces");
    }

    #[test]
    fn a_name_that_no_object_can_have_is_refused_before_anything_is_remembered_of_it() {
        let target = |namespace: &str, name: &str| Target {
            group: String::new(),
            version: "v1".into(),
            kind: "Pod".into(),
            key: ObjectKey::new(Some(namespace), name),
        };
        let get = |namespace: &str, name: &str| of_get(&claim(), Some("home"), &target(namespace, name)).map(drop);
        assert_eq!(get(&"n".repeat(63), &"x".repeat(253)), Ok(()));
        for (namespace, name) in
            [("home", ""), ("", "x"), ("home", &*"x".repeat(254)), (&*"n".repeat(64), "x"), ("home", "a/b"), ("a/b", "x"), ("home", "a\n")]
        {
            let refused = get(namespace, name);
            assert!(matches!(&refused, Err(ReadError::Other(why)) if why.len() < 300), "{refused:?}");
        }
        assert!(matches!(list(kind("Pod", "pods", true), Some(&"n".repeat(1000))), Err(ReadError::Other(_))));
        let long = get_of(&"K".repeat(10_000));
        assert!(matches!(&long, Err(ReadError::Forbidden(why)) if why.len() < 600), "{long:?}");
    }

    fn get_of(kind: &str) -> Result<(), ReadError> {
        get("v1", kind, Some("home"))
    }

    #[test]
    fn a_namespace_goes_with_kinds_that_have_one() {
        let other = |result: Result<(), ReadError>| assert!(matches!(&result, Err(ReadError::Other(_))), "{result:?}");
        other(get("v1", "Pod", None));
        other(get("v1", "Node", Some("home")));
        other(list(kind("Node", "nodes", false), Some("home")));
    }
}

//! Answers the reads of runs from the host's informers, within the claim and the rights of the plugin's ServiceAccount.
//!
//! # Expected flow
//! The controller makes one [`RunReader`] for each run. A read is judged in this order: the claim [covers](grant) it, the account may
//! do it ([`Authority`]), the informer has listed; then it is noted in the run's footprint and answered.
//!
//! # Guarantees
//! Every read is judged here and nowhere else, and counted by how it was answered. No request leaves the host for an object: the API
//! server is asked only what the account may do, and that once in a while.
//!
//! # Caveats
//! The informers read with the rights of the host's own account. It needs `list` and `watch` on what plugins read, and a plugin gets
//! what both the host and the plugin's account may read.

use std::{fmt, sync::Arc, time::Duration};

use futures::{FutureExt, future::BoxFuture};

use crate::{
    authority::{Authority, Denial},
    catalog::Serving,
    claim::Read,
    kinds::{Collection, Kinds},
    label::Selector,
    metrics::{Answered, Metrics},
    object::{Key, Object, ObjectKey},
    plugin::limits,
    reads::{Footprint, Page, Query, ReadError, Reader, Scope, Target, grant},
};

/// How long a read waits for the first list of its kind: plugins begin to run when their reads begin to be watched.
const FIRST_LIST: Duration = Duration::from_secs(3);

/// What all runs read through.
#[derive(Debug)]
pub struct Cluster {
    kinds: Arc<Kinds>,
    authority: Authority,
    metrics: Arc<Metrics>,
}

/// The reads of one run.
pub struct RunReader {
    cluster: Arc<Cluster>,
    serving: Arc<Serving>,
    key: Key,
    footprint: Footprint,
}

impl fmt::Debug for RunReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunReader").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Cluster {
    /// Reads these kinds with what this authority allows.
    pub fn new(kinds: Arc<Kinds>, authority: Authority, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { kinds, authority, metrics })
    }

    /// For a run of an object by this version of its plugin.
    pub fn reader(self: &Arc<Self>, serving: &Arc<Serving>, key: &Key, footprint: Footprint) -> Arc<dyn Reader> {
        Arc::new(RunReader { cluster: self.clone(), serving: serving.clone(), key: key.clone(), footprint })
    }
}

impl Reader for RunReader {
    fn get(&self, target: Target) -> BoxFuture<'_, Result<Option<Arc<Object>>, ReadError>> {
        async move { self.counted(self.found(target).await) }.boxed()
    }

    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, ReadError>> {
        async move { self.counted(self.listed(query).await) }.boxed()
    }
}

impl RunReader {
    async fn found(&self, target: Target) -> Result<Option<Arc<Object>>, ReadError> {
        let read = grant::of_get(&self.serving.claim, self.home(), &target)?;
        let key = target.key;
        let collection = self.collection(read, key.namespace.as_deref())?;
        self.allowed(read, "get", key.namespace.as_deref()).await?;
        let selector = selector(&read.label_selector)?;
        let scope = Scope { namespace: key.namespace.clone(), name: Some(key.name.clone()), selector: selector.clone() };
        let listed = until_listed(&collection, read).await;
        self.footprint.note(&read.kind.group_kind(), scope);
        listed?;
        Ok(collection.get(&key).map(Object::whole).filter(|object| means(&selector, object)))
    }

    async fn listed(&self, query: Query) -> Result<Page, ReadError> {
        let read = grant::of_list(&self.serving.claim, self.home(), &query)?;
        let namespace = query.namespace.as_deref();
        let collection = self.collection(read, namespace)?;
        let last = query.after.as_deref().map(Page::place).transpose()?;
        let selector = selector(&read.label_selector)?.and(&selector(&query.label_selector)?);
        match (namespace, collection.namespaces()) {
            (None, Some(watched)) => {
                for namespace in watched {
                    self.allowed(read, "list", Some(namespace)).await?;
                }
            }
            (namespace, _) => self.allowed(read, "list", namespace).await?,
        }
        let scope = Scope { namespace: namespace.map(Arc::from), name: None, selector: selector.clone() };
        let listed = until_listed(&collection, read).await;
        self.footprint.note(&read.kind.group_kind(), scope);
        listed?;
        Ok(page(&collection, namespace, last, &selector, query.limit))
    }

    /// The namespace of the run's object.
    fn home(&self) -> Option<&str> {
        self.key.object.namespace.as_deref()
    }

    /// What holds the objects of a kind, or would hold those of this namespace.
    fn collection(&self, read: &Read, namespace: Option<&str>) -> Result<Arc<Collection>, ReadError> {
        // A version that has been replaced may still run, and what it alone has read is not watched any more.
        let collection = self.cluster.kinds.readable(&read.kind, &read.label_selector).ok_or(ReadError::NotSynced)?;
        match (namespace, collection.namespaces()) {
            (Some(namespace), Some(watched)) if !watched.contains(&namespace) => Err(ReadError::Forbidden(format!(
                "the host watches the namespaces {} alone, and not {namespace:?}: start it with --watch-namespace {namespace} too",
                watched.join(", ")
            ))),
            _ => Ok(collection),
        }
    }

    async fn allowed(&self, read: &Read, verb: &'static str, namespace: Option<&str>) -> Result<(), ReadError> {
        let kind = &read.kind;
        let Some(actor) = self.serving.actor() else {
            return Err(ReadError::Forbidden(format!(
                "the plugin has no ServiceAccount to {verb} {} as: name one in `serviceAccountName` of its plugin.yaml",
                kind.resource()
            )));
        };
        self.cluster.authority.check(&actor, verb, &kind.group, &kind.plural, namespace).await.map_err(|denial| match denial {
            Denial::Forbidden(why) => ReadError::Forbidden(why),
            Denial::Unknown(why) => ReadError::Unavailable(why),
        })
    }

    fn counted<T>(&self, answer: Result<T, ReadError>) -> Result<T, ReadError> {
        let answered = match &answer {
            Ok(_) => Answered::Ok,
            Err(ReadError::Forbidden(_)) => Answered::Forbidden,
            Err(ReadError::NotSynced) => Answered::NotSynced,
            Err(ReadError::Unavailable(_) | ReadError::Other(_)) => Answered::Error,
        };
        self.cluster.metrics.read(&self.key.kind, answered);
        answer
    }
}

fn selector(text: &str) -> Result<Selector, ReadError> {
    text.parse().map_err(|error: crate::label::InvalidSelector| ReadError::Other(error.to_string()))
}

fn means(selector: &Selector, object: &Object) -> bool {
    selector.selects_all() || selector.matches(&object.labels())
}

async fn until_listed(collection: &Collection, read: &Read) -> Result<(), ReadError> {
    let listed = tokio::time::timeout(FIRST_LIST, collection.listed()).await;
    let health = collection.health();
    let kind = read.kind.resource();
    match health.error {
        _ if health.synced => Ok(()),
        // The error is of an informer that goes on trying, and no fault of the handler's.
        Some(error) if listed.is_ok() => Err(ReadError::Unavailable(format!(
            "the host cannot read {kind} (for which its own ServiceAccount needs list and watch on {kind}; \"berth push\" grants it): {error}"
        ))),
        _ => Err(ReadError::NotSynced),
    }
}

/// As many objects as are asked for, within the host's limits; one at least, however large it is.
fn page(collection: &Collection, namespace: Option<&str>, last: Option<ObjectKey>, selector: &Selector, limit: u32) -> Page {
    let limit = match usize::try_from(limit) {
        Ok(limit @ 1..limits::READ_OBJECTS) => limit,
        _ => limits::READ_OBJECTS,
    };
    let mut page = Page::default();
    let mut bytes = 0;
    for object in collection.after(last, namespace).map(Object::whole).filter(|object| means(selector, object)) {
        bytes += object.json.len();
        if page.items.len() == limit || (bytes > limits::READ_BYTES && !page.items.is_empty()) {
            page.next = page.items.last().map(|last| Page::token(&last.key));
            break;
        }
        page.items.push(object);
    }
    page
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{account::Accounts, authority::Question, catalog::tests::serving, claim::Claim, object::Kind, reads::Index, watch::Store};

    fn configmaps() -> Kind {
        Kind { group: String::new(), version: "v1".into(), kind: "ConfigMap".into(), plural: "configmaps".into(), namespaced: true }
    }

    type Asked = Arc<Mutex<Vec<Question>>>;

    /// A run of an object in the namespace `a`, on what this collection holds, and the questions that are asked: about all but `closed`
    /// the answer is yes.
    fn run(collection: Collection, account: Option<&str>) -> (Arc<dyn Reader>, Asked, Index, Key) {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let questions = asked.clone();
        let ask = move |question: Question| {
            let closed = question.namespace.as_deref() == Some("closed");
            questions.lock().expect("no panic").push(question);
            async move { if closed { Ok(Err("it is closed".into())) } else { Ok(Ok(())) } }.boxed()
        };
        let authority = Authority::new(Accounts::fixed("sys", "admin", &["p"]), Box::new(ask));
        let read = Read { kind: configmaps(), all_namespaces: true, label_selector: "app".into() };
        let plain = Arc::into_inner(serving(b"1", "a")).expect("nobody else has it");
        let claim = Arc::new(Claim { reads: vec![read], ..Claim::plain() });
        let serving = Arc::new(Serving { claim, service_account: account.map(str::to_owned), ..plain });
        let key = Key { kind: serving.claim.reconciles.group_kind(), object: ObjectKey::new(Some("a"), "o") };
        let index = Index::default();
        let cluster = Cluster::new(Arc::new(Kinds::reading(&configmaps(), collection)), authority, Arc::default());
        (cluster.reader(&serving, &key, index.begin(&key)), asked, index, key)
    }

    fn target(namespace: &str, name: &str) -> Target {
        Target { group: String::new(), version: "v1".into(), kind: "ConfigMap".into(), key: ObjectKey::new(Some(namespace), name) }
    }

    fn query(label_selector: &str) -> Query {
        Query { kind: configmaps(), namespace: None, label_selector: label_selector.into(), limit: 0, after: None }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_read_is_noted_even_if_it_is_not_there_or_not_meant() {
        let mut hidden = object("a", "hidden", "x", 1);
        hidden.json = hidden.json.read().replace("app", "other").into();
        let (reader, _, index, key) = run(collection(vec![(None, vec![object("a", "c", "x", 1), hidden])]), Some("p"));
        assert!(reader.get(target("a", "c")).await.expect("answered").is_some());
        for name in ["hidden", "absent"] {
            assert!(reader.get(target("a", name)).await.expect("answered").is_none(), "{name}");
        }
        let wakes = |name: &str| index.affected(&configmaps().group_kind(), None, Some(&object("a", name, "x", 1)));
        for name in ["c", "hidden", "absent"] {
            assert_eq!(wakes(name), std::slice::from_ref(&key), "{name}");
        }
        assert!(wakes("unread").is_empty());
        assert_eq!(names(&reader.list(query("app=x")).await.expect("answered")), ["a/c"]);
        assert_eq!(wakes("unread"), std::slice::from_ref(&key));
    }

    #[tokio::test(start_paused = true)]
    async fn without_an_account_nothing_is_read_and_nobody_is_asked() {
        let (reader, asked, ..) = run(collection(vec![(None, Vec::new())]), None);
        let refused = reader.get(target("a", "c")).await;
        assert!(matches!(&refused, Err(ReadError::Forbidden(why)) if why.contains("`serviceAccountName`")), "{refused:?}");
        assert!(asked.lock().expect("no panic").is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_of_all_namespaces_is_allowed_where_each_watched_one_is() {
        let places = |names: &[&'static str]| collection(names.iter().map(|name| (Some(*name), Vec::new())).collect());
        let (reader, asked, ..) = run(places(&["a", "b"]), Some("p"));
        assert!(reader.list(query("")).await.is_ok());
        let namespaces: Vec<_> =
            asked.lock().expect("no panic").iter().map(|question| (question.verb, question.namespace.clone())).collect();
        assert_eq!(namespaces, [("list", Some("a".into())), ("list", Some("b".into()))]);
        let (reader, ..) = run(places(&["a", "closed"]), Some("p"));
        assert!(matches!(reader.list(query("")).await, Err(ReadError::Forbidden(_))));
        let (reader, ..) = run(places(&["a", "b"]), Some("p"));
        let unwatched = reader.get(target("c", "x")).await;
        assert!(matches!(&unwatched, Err(ReadError::Forbidden(why)) if why.contains("--watch-namespace c")), "{unwatched:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_list_is_waited_for_a_moment() {
        let (reader, ..) = run(Collection::of_stores(vec![(None, Arc::default())]), Some("p"));
        let started = tokio::time::Instant::now();
        assert_eq!(reader.get(target("a", "c")).await.map(drop), Err(ReadError::NotSynced));
        assert_eq!(started.elapsed(), FIRST_LIST);
    }

    #[tokio::test(start_paused = true)]
    async fn a_selector_or_a_token_that_is_none_is_told_so() {
        let (reader, ..) = run(collection(vec![(None, Vec::new())]), Some("p"));
        assert!(matches!(reader.list(query("a in b")).await, Err(ReadError::Other(why)) if why.contains("not valid")));
        let odd = Query { after: Some("no-token".into()), ..query("") };
        assert!(matches!(reader.list(odd).await, Err(ReadError::Other(why)) if why.contains("no token")));
    }

    fn object(namespace: &str, name: &str, app: &str, size: usize) -> Object {
        let data = "x".repeat(size);
        let text = format!(r#"{{"metadata":{{"namespace":"{namespace}","name":"{name}","labels":{{"app":"{app}"}}}},"data":"{data}"}}"#);
        Object::parse(&text).expect("parses")
    }

    fn names(page: &Page) -> Vec<String> {
        page.items.iter().map(|object| object.key.to_string()).collect()
    }

    fn collection(stores: Vec<(Option<&str>, Vec<Object>)>) -> Collection {
        let store =
            |(namespace, objects): (Option<&str>, Vec<Object>)| (namespace.map(str::to_owned), Arc::new(Store::listed_with(objects)));
        Collection::of_stores(stores.into_iter().map(store).collect())
    }

    fn all(collection: &Collection, namespace: Option<&str>, selector: &str, limit: u32) -> Vec<Vec<String>> {
        let (mut pages, mut last) = (Vec::new(), None);
        loop {
            let page = page(collection, namespace, last, &selector.parse().expect("valid"), limit);
            pages.push(names(&page));
            match page.next {
                Some(next) => last = Some(Page::place(&next).expect("a token")),
                None => return pages,
            }
        }
    }

    #[test]
    fn pages_come_in_order_and_end_with_the_last_object() {
        let objects = ["b", "a"].iter().flat_map(|namespace| (0..3).map(|number| object(namespace, &number.to_string(), "x", 1)));
        let one = collection(vec![(None, objects.clone().collect())]);
        let of = |wanted: &str| objects.clone().filter(|object| object.key.namespace.as_deref() == Some(wanted)).collect::<Vec<_>>();
        let two = collection(vec![(Some("a"), of("a")), (Some("b"), of("b"))]);
        for collection in [one, two] {
            assert_eq!(all(&collection, None, "", 4), [vec!["a/0", "a/1", "a/2", "b/0"], vec!["b/1", "b/2"]]);
            assert_eq!(all(&collection, Some("b"), "", 3), [vec!["b/0", "b/1", "b/2"]], "no empty page behind a full one");
            assert_eq!(all(&collection, None, "", 0).concat().len(), 6);
        }
    }

    #[test]
    fn what_a_selector_means_is_paged_as_if_there_were_nothing_else() {
        let objects = (0..2000).map(|number| object("a", &format!("{number:04}"), if number % 100 == 0 { "x" } else { "y" }, 1));
        let collection = collection(vec![(None, objects.collect())]);
        let pages = all(&collection, Some("a"), "app=x", 8);
        assert_eq!((pages.len(), pages[0].len(), pages[2].len(), pages.concat()[19].as_str()), (3, 8, 4, "a/1900"));
        assert_eq!(all(&collection, None, "", u32::MAX)[0].len(), limits::READ_OBJECTS);
    }

    #[test]
    fn a_page_stays_within_its_bytes_and_has_one_object_at_least() {
        let large = limits::READ_BYTES + 1;
        let sizes = [1, large, 1, 1, large / 2, large / 2, 1];
        let objects = sizes.iter().enumerate().map(|(number, size)| object("a", &number.to_string(), "x", *size)).collect();
        let pages = all(&collection(vec![(None, objects)]), None, "", 0);
        assert_eq!(pages, [vec!["a/0"], vec!["a/1"], vec!["a/2", "a/3", "a/4"], vec!["a/5", "a/6"]]);
    }

    #[test]
    fn a_token_stays_good_when_its_object_goes_and_others_come() {
        let before = collection(vec![(None, vec![object("a", "b", "x", 1), object("a", "d", "x", 1)])]);
        let first = page(&before, None, None, &Selector::default(), 1);
        let after = collection(vec![(None, vec![object("a", "a", "x", 1), object("a", "c", "x", 1), object("a", "d", "x", 1)])]);
        let last = Page::place(&first.next.expect("there is more")).expect("a token");
        assert_eq!(names(&page(&after, None, Some(last), &Selector::default(), 9)), ["a/c", "a/d"]);
    }
}

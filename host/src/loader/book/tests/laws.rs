//! What holds after any order of steps.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn once_a_plugin_serves_no_delivery_or_failure_stops_it(steps in prop::collection::vec((0..3_u8, any::<bool>()), 1..40)) {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        prop_assert!(book.serving(&facts()).is_some());
        let mut jobs = vec![];
        let mut denied = facts();
        let missing = Needs::of(&Claim::full()).permissions().next().expect("list");
        denied.access.insert(Needs::of(&Claim::full()), Access::Denied(missing, None));
        for (at, (step, good)) in steps.into_iter().enumerate() {
            let at = u32::try_from(at).expect("few");
            match step {
                0 => jobs.extend(book.deliver(delivery("p", at + 2))),
                1 => if let Some(job) = jobs.pop() {
                    book.finish("p", job.number, if good { Ok(version(&at.to_string())) } else { refused("bad") });
                },
                _ => jobs.reverse(),
            }
            let granted = facts();
            let serving = book.serving(if good { &denied } else { &granted });
            prop_assert!(serving.is_some());
        }
    }

    #[test]
    fn the_kind_always_belongs_to_the_oldest_that_is_loaded(steps in prop::collection::vec((0..4_u8, any::<bool>()), 1..40)) {
        let mut book = Book::default();
        let mut loaded = BTreeSet::new();
        for (at, (plugin, there)) in steps.into_iter().enumerate() {
            let name = format!("p{plugin}");
            if there {
                book.load(&name, u32::try_from(at).expect("few") + 1, Ok(version(&name)));
                loaded.insert(name);
            } else {
                book.withdraw(MAP, &name);
                loaded.remove(&name);
            }
            prop_assert_eq!(book.serving(&facts()).map(|(name, _)| name), loaded.first().cloned());
        }
    }
}

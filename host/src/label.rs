//! Labels as Kubernetes has them: the syntax of keys and values, and selectors as `kubectl -l` takes them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    str::FromStr,
};

use kube::core::{Expression, SelectorExt};

/// The labels of an object.
pub type Labels = BTreeMap<String, String>;

/// The longest text of a selector that is read.
const SELECTOR_BYTES: usize = 4 << 10;

/// Which objects are meant, by their labels. All of its requirements have to hold; without any it means all objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Selector(BTreeSet<Expression>);

/// The text is no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the label selector {text:?} is not valid: {why}")]
pub struct InvalidSelector {
    text: String,
    why: String,
}

impl Selector {
    /// Whether it means every object.
    pub fn selects_all(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it means an object with these labels.
    pub fn matches(&self, labels: &Labels) -> bool {
        self.0.iter().all(|expression| expression.matches(labels))
    }

    /// What both mean.
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).cloned().collect())
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, expression) in self.0.iter().enumerate() {
            write!(f, "{}{expression}", if number == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl FromStr for Selector {
    type Err = InvalidSelector;

    /// Equality (`a=b`, `a==b`, `a!=b`), sets (`a in (b, c)`, `a notin (b)`) and existence (`a`, `!a`), with commas between.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parsed = if text.len() > SELECTOR_BYTES {
            Err(format!("it is longer than the {SELECTOR_BYTES} bytes that one may have"))
        } else {
            Parser { tokens: tokens(text), at: 0 }.selector()
        };
        parsed.map(Self).map_err(|why| InvalidSelector { text: text.chars().take(100).collect(), why })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'t> {
    Word(&'t str),
    Sign(&'t str),
}

const SIGNS: [&str; 9] = ["!=", "==", "=", "!", ",", "(", ")", "<", ">"];

fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let length = match SIGNS.iter().find(|sign| rest.starts_with(**sign)) {
            Some(sign) => {
                found.push(Token::Sign(sign));
                sign.len()
            }
            None => {
                let ends = |c: char| c.is_whitespace() || "!=,()<>".contains(c);
                let end = rest.find(ends).unwrap_or(rest.len());
                found.push(Token::Word(&rest[..end]));
                end
            }
        };
        rest = rest[length..].trim_start();
    }
    found
}

struct Parser<'t> {
    tokens: Vec<Token<'t>>,
    at: usize,
}

impl<'t> Parser<'t> {
    fn selector(mut self) -> Result<BTreeSet<Expression>, String> {
        let mut expressions = BTreeSet::new();
        if self.tokens.is_empty() {
            return Ok(expressions);
        }
        loop {
            expressions.insert(self.expression()?);
            match self.next() {
                None => return Ok(expressions),
                Some(Token::Sign(",")) => {}
                Some(other) => return Err(format!("a comma is expected before {}", show(other))),
            }
        }
    }

    fn expression(&mut self) -> Result<Expression, String> {
        if self.take("!") {
            return Ok(Expression::DoesNotExist(self.key()?));
        }
        let key = self.key()?;
        match self.peek() {
            Some(Token::Sign(sign @ ("=" | "==" | "!="))) => {
                self.at += 1;
                let value = self.value()?;
                Ok(if sign == "!=" { Expression::NotEqual(key, value) } else { Expression::Equal(key, value) })
            }
            Some(Token::Word(word @ ("in" | "notin"))) => {
                self.at += 1;
                let values = self.values()?;
                Ok(if word == "in" { Expression::In(key, values) } else { Expression::NotIn(key, values) })
            }
            Some(Token::Sign("<" | ">")) => Err("comparisons of numbers are not offered".into()),
            _ => Ok(Expression::Exists(key)),
        }
    }

    fn values(&mut self) -> Result<BTreeSet<String>, String> {
        if !self.take("(") {
            return Err("the values of a set stand in brackets, as in `a in (b, c)`".into());
        }
        let mut values = BTreeSet::new();
        loop {
            values.insert(self.value()?);
            match self.next() {
                Some(Token::Sign(")")) => return Ok(values),
                Some(Token::Sign(",")) => {}
                _ => return Err("a set of values is not closed".into()),
            }
        }
    }

    fn key(&mut self) -> Result<String, String> {
        match self.next() {
            Some(Token::Word(key)) if is_key(key) => Ok(key.to_owned()),
            Some(other) => Err(format!("{} is no key of a label", show(other))),
            None => Err("a key is missing at its end".into()),
        }
    }

    /// A value may be empty: then what comes next belongs to something else.
    fn value(&mut self) -> Result<String, String> {
        match self.peek() {
            Some(Token::Word(value)) if is_value(value) => {
                self.at += 1;
                Ok(value.to_owned())
            }
            None | Some(Token::Sign("," | ")")) => Ok(String::new()),
            Some(other) => Err(format!("{} is no value of a label", show(other))),
        }
    }

    fn take(&mut self, sign: &str) -> bool {
        let there = self.peek() == Some(Token::Sign(sign));
        self.at += usize::from(there);
        there
    }

    fn peek(&self) -> Option<Token<'t>> {
        self.tokens.get(self.at).copied()
    }

    fn next(&mut self) -> Option<Token<'t>> {
        let token = self.peek()?;
        self.at += 1;
        Some(token)
    }
}

fn show(token: Token<'_>) -> String {
    let (Token::Word(text) | Token::Sign(text)) = token;
    format!("{text:?}")
}

/// An optional domain, a slash, a name.
pub fn is_key(key: &str) -> bool {
    match key.split_once('/') {
        Some((domain, name)) => is_subdomain(domain) && is_name(name),
        None => is_name(key),
    }
}

/// Empty or a name.
pub fn is_value(value: &str) -> bool {
    value.is_empty() || is_name(value)
}

/// At most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends.
pub fn is_name(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = name.as_bytes();
    bytes.len() <= 63 && edge(bytes.first()) && edge(bytes.last()) && name.bytes().all(inner)
}

/// A name of DNS in lower case, such as `notify.acme.io`.
pub fn is_subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(|label| is_dns_label(label) && !label.bytes().any(|byte| byte.is_ascii_uppercase()))
}

/// One part of a name of DNS, in whatever case.
pub fn is_dns_label(label: &str) -> bool {
    is_name(label) && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn selectors_mean_what_kubectl_means() {
        let object = labels(&[("app", "web"), ("tier", ""), ("acme.io/team", "blue")]);
        for (text, expected) in [
            ("", true),
            ("  ", true),
            ("app", true),
            ("!app", false),
            ("! none", true),
            ("app=web", true),
            ("app == web", true),
            ("app=db", false),
            ("app!=web", false),
            ("none!=web", true),
            ("tier=", true),
            ("tier=,app=web", true),
            ("app in (db, web)", true),
            ("app in (db)", false),
            ("app notin (db,web)", false),
            ("none notin (db)", true),
            ("tier in ()", true),
            ("acme.io/team=blue,app in (web),!none", true),
            ("acme.io/team=blue,app in (web),none", false),
            ("in in (in)", false),
        ] {
            let selector: Selector = text.parse().unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(selector.matches(&object), expected, "{text:?}");
        }
    }

    #[test]
    fn what_is_no_selector_is_refused_with_the_reason() {
        for (text, words) in [
            (",", "\",\" is no key"),
            ("app=web,", "a key is missing at its end"),
            ("app web", "a comma is expected before \"web\""),
            ("app in web", "stand in brackets"),
            ("app in (web", "not closed"),
            ("app>1", "comparisons of numbers"),
            ("app=a=b", "a comma is expected"),
            ("a/b/c=d", "is no key"),
            ("app=-x", "\"-x\" is no value"),
            (&"a".repeat(5000), "longer than"),
        ] {
            let error = text.parse::<Selector>().expect_err(text).to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn two_selectors_together_need_what_both_need() {
        let both = "a=b".parse::<Selector>().expect("valid").and(&"c".parse().expect("valid"));
        assert!(both.matches(&labels(&[("a", "b"), ("c", "d")])));
        assert!(!both.matches(&labels(&[("a", "b")])) && !both.matches(&labels(&[("c", "d")])));
        assert!(Selector::default().selects_all() && !both.selects_all());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_and_what_was_read_reads_again(text in "[a-c!=,() <>]{0,12}|.{0,40}|a (in|notin) \\([a-c, ]{0,8}\\)(,[a-c]!?=?[a-c]?){0,3}") {
            if let Ok(selector) = text.parse::<Selector>() {
                prop_assert_eq!(selector.to_string().parse::<Selector>(), Ok(selector));
            }
        }
    }
}

//! `#[reconciler]`: the claim of a handler, and its export.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{
    Ident, ImplItem, ItemImpl, LitInt, LitStr, Path, Token, bracketed, parenthesized,
    parse::{Parse, ParseStream},
    punctuated::Punctuated,
};

#[derive(Default)]
struct Args {
    progress: Option<Progress>,
    dead_letter: Option<DeadLetter>,
    priority: Option<LitStr>,
    hosts: Vec<LitStr>,
    reads: Vec<Read>,
    owns: Vec<Path>,
    finalizer: bool,
    label_prefixes: Vec<LitStr>,
}

#[derive(Default)]
struct Progress {
    phase: Option<LitStr>,
    settled: Vec<LitStr>,
    mirror_label: Option<LitStr>,
}

#[derive(Default)]
struct DeadLetter {
    after: Option<LitInt>,
    phase: Option<LitStr>,
    retries: Option<LitStr>,
    message: Option<LitStr>,
}

struct Read {
    kind: Path,
    all_namespaces: bool,
    selector: Option<LitStr>,
}

impl Parse for Args {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut args = Self::default();
        each(input, |name, input| {
            match name.to_string().as_str() {
                "progress" => args.progress = Some(group(input, Progress::parse)?),
                "dead_letter" => args.dead_letter = Some(group(input, DeadLetter::parse)?),
                "priority" => args.priority = Some(field(input, "spec.")?),
                "hosts" => args.hosts.extend(group(input, Punctuated::<LitStr, Token![,]>::parse_terminated)?),
                "read" => args.reads.push(group(input, Read::parse)?),
                "owns" => args.owns.extend(group(input, Punctuated::<Path, Token![,]>::parse_terminated)?),
                "finalizer" => args.finalizer = true,
                "label_prefixes" => args.label_prefixes.extend(group(input, Punctuated::<LitStr, Token![,]>::parse_terminated)?),
                _ => return Err(unknown(&name, "progress, dead_letter, priority, hosts, read, owns, finalizer, label_prefixes")),
            }
            Ok(())
        })?;
        args.check()?;
        Ok(args)
    }
}

impl Args {
    /// What the host would refuse, said when the plugin is compiled.
    fn check(&self) -> syn::Result<()> {
        let Some(dead_letter) = &self.dead_letter else { return Ok(()) };
        let phase = dead_letter.phase.as_ref().map_or_else(|| "Failed".to_owned(), LitStr::value);
        let settled = self.progress.as_ref().map(|progress| progress.settled.as_slice()).unwrap_or_default();
        if !settled.iter().any(|one| one.value() == phase) {
            let span = dead_letter.phase.as_ref().map_or_else(proc_macro2::Span::call_site, LitStr::span);
            return Err(syn::Error::new(
                span,
                format!("the phase of `dead_letter`, {phase}, must be one of `progress(settled = […])`: it ends the work"),
            ));
        }
        Ok(())
    }
}

impl Progress {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let (mut progress, span) = (Self::default(), input.span());
        each(input, |name, input| {
            match name.to_string().as_str() {
                "phase" => progress.phase = Some(field(input, "status.")?),
                "settled" => {
                    input.parse::<Token![=]>()?;
                    let inside;
                    bracketed!(inside in input);
                    progress.settled = Punctuated::<LitStr, Token![,]>::parse_terminated(&inside)?.into_iter().collect();
                }
                "mirror_label" => progress.mirror_label = Some(value(input)?),
                _ => return Err(unknown(&name, "phase, settled, mirror_label")),
            }
            Ok(())
        })?;
        if progress.settled.is_empty() {
            return Err(syn::Error::new(span, r#"`progress` needs the phases that end the work: `settled = ["Done", "Failed"]`"#));
        }
        Ok(progress)
    }
}

impl DeadLetter {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut dead_letter = Self::default();
        each(input, |name, input| {
            match name.to_string().as_str() {
                "after" => dead_letter.after = Some(value(input)?),
                "phase" => dead_letter.phase = Some(value(input)?),
                "retries" => dead_letter.retries = Some(field(input, "status.")?),
                "message" => dead_letter.message = Some(field(input, "status.")?),
                _ => return Err(unknown(&name, "after, phase, retries, message")),
            }
            Ok(())
        })?;
        match &dead_letter.after {
            Some(after) if after.base10_parse::<u32>()? == 0 => Err(syn::Error::new(after.span(), "`after` counts failures, from 1")),
            _ => Ok(dead_letter),
        }
    }
}

impl Read {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut read = Self { kind: input.parse()?, all_namespaces: false, selector: None };
        if input.parse::<Option<Token![,]>>()?.is_some() {
            each(input, |name, input| {
                match name.to_string().as_str() {
                    "all_namespaces" => read.all_namespaces = true,
                    "selector" => read.selector = Some(value(input)?),
                    _ => return Err(unknown(&name, "all_namespaces, selector")),
                }
                Ok(())
            })?;
        }
        Ok(read)
    }
}

/// Calls `take` with each name of a comma-separated list.
fn each(input: ParseStream<'_>, mut take: impl FnMut(Ident, ParseStream<'_>) -> syn::Result<()>) -> syn::Result<()> {
    while !input.is_empty() {
        let name = input.parse()?;
        take(name, input)?;
        if !input.is_empty() {
            input.parse::<Token![,]>()?;
        }
    }
    Ok(())
}

fn group<T>(input: ParseStream<'_>, parse: impl FnOnce(ParseStream<'_>) -> syn::Result<T>) -> syn::Result<T> {
    let inside;
    parenthesized!(inside in input);
    parse(&inside)
}

fn value<T: Parse>(input: ParseStream<'_>) -> syn::Result<T> {
    input.parse::<Token![=]>()?;
    input.parse()
}

fn field(input: ParseStream<'_>, root: &str) -> syn::Result<LitStr> {
    let path: LitStr = value(input)?;
    if path.value().strip_prefix(root).is_none_or(str::is_empty) {
        return Err(syn::Error::new(path.span(), format!("name a field such as `{root}x`")));
    }
    Ok(path)
}

fn unknown(name: &Ident, known: &str) -> syn::Error {
    syn::Error::new(name.span(), format!("`{name}` is not known here: {known}"))
}

/// A finalizer without `finalize` would delay every deletion for nothing, and a `finalize` without it would never be called.
fn agrees(finalizer: bool, item: &ItemImpl) -> syn::Result<()> {
    let finalize = item.items.iter().find_map(|item| match item {
        ImplItem::Fn(function) if function.sig.ident == "finalize" => Some(function),
        _ => None,
    });
    match (finalizer, finalize) {
        (true, None) => {
            Err(syn::Error::new_spanned(&item.self_ty, "`finalizer` needs a `fn finalize`: what is to be undone at the deletion"))
        }
        (false, Some(function)) => {
            Err(syn::Error::new_spanned(&function.sig.ident, "`finalize` is never called: add `finalizer` to `#[reconciler(…)]`"))
        }
        _ => Ok(()),
    }
}

pub fn expand(args: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let Args { progress, dead_letter, priority, hosts, reads, owns, finalizer, label_prefixes } = syn::parse2(args)?;
    let item: ItemImpl = syn::parse2(item)?;
    let handler = &item.self_ty;
    if item.trait_.is_none() {
        return Err(syn::Error::new_spanned(&item.self_ty, "#[reconciler] goes on an `impl Reconciler for …`"));
    }
    agrees(finalizer, &item)?;
    let or = |given: Option<LitStr>, default: &str| given.map_or_else(|| quote!(#default), |given| quote!(#given));
    let maybe = |given: Option<LitStr>| given.map_or_else(|| quote!(None), |given| quote!(Some(#given)));

    let progress = progress.map_or_else(
        || quote!(None),
        |Progress { phase, settled, mirror_label }| {
            let (phase, mirror_label) = (or(phase, "status.phase"), maybe(mirror_label));
            quote!(Some(::berth_sdk::claim::Progress { phase_field: #phase, settled: &[#(#settled),*], mirror_label: #mirror_label }))
        },
    );
    let dead_letter = dead_letter.map_or_else(
        || quote!(None),
        |DeadLetter { after, phase, retries, message }| {
            let retries = match (&after, retries) {
                (None, None) => quote!(None),
                (_, retries) => {
                    let retries = or(retries, "status.retries");
                    quote!(Some(#retries))
                }
            };
            let after = after.map_or_else(|| quote!(None), |after| quote!(Some(#after)));
            let (phase, message) = (or(phase, "Failed"), or(message, "status.message"));
            quote!(Some(::berth_sdk::claim::DeadLetter { after: #after, phase: #phase, retries_field: #retries, message_field: #message }))
        },
    );
    let priority = maybe(priority);
    let reaches = reads.iter().filter(|read| !read.all_namespaces).map(|Read { kind, .. }| {
        let sentence = "a kind without namespaces is read with `all_namespaces`";
        quote!(
            const _: () = assert!(<#kind as ::berth_sdk::Readable>::KIND.namespaced, #sentence);
        )
    });
    let reaches = quote!(#(#reaches)*);
    let reads = reads.into_iter().map(|Read { kind, all_namespaces, selector }| {
        let selector = or(selector, "");
        quote!(::berth_sdk::claim::Read { kind: <#kind as ::berth_sdk::Readable>::KIND, all_namespaces: #all_namespaces, label_selector: #selector })
    });

    Ok(quote! {
        #item

        #reaches

        impl ::berth_sdk::claim::Describe for #handler {
            const CLAIM: ::berth_sdk::claim::Claim = ::berth_sdk::claim::Claim {
                reconciles: <<#handler as ::berth_sdk::Reconciler>::Object as ::berth_sdk::Resource>::KIND,
                progress: #progress,
                dead_letter: #dead_letter,
                priority_field: #priority,
                reads: &[#(#reads),*],
                owns: &[#(<#owns as ::berth_sdk::Readable>::KIND),*],
                hosts: &[#(#hosts),*],
                finalizer: #finalizer,
                label_prefixes: &[#(#label_prefixes),*],
            };
        }

        // A cdylib with these symbols does not link natively.
        #[cfg(target_family = "wasm")]
        const _: () = {
            type Exported = ::berth_sdk::__private::Component<#handler>;
            ::berth_sdk::__private::export!(Exported with_types_in ::berth_sdk::__private::bindings);
        };
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(args: TokenStream, finalize: TokenStream) -> Result<String, String> {
        let item = quote! {
            impl Reconciler for Handler {
                type Object = Thing;
                fn reconcile(thing: &Thing, ctx: &Context) -> Result<Action, Error> { Ok(Action::await_change()) }
                #finalize
            }
        };
        expand(args, item).map(|tokens| tokens.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_finalizer_and_its_function_come_together() {
        let finalize = quote!(
            fn finalize(thing: &Thing, ctx: &Context) -> Result<Action, Error> {
                Ok(Action::await_change())
            }
        );
        assert!(expanded(quote!(finalizer), finalize.clone()).is_ok());
        assert!(expanded(quote!(), quote!()).is_ok());
        assert!(expanded(quote!(finalizer), quote!()).expect_err("refused").contains("needs a `fn finalize`"));
        assert!(expanded(quote!(), finalize).expect_err("refused").contains("never called"));
    }
}

//! `#[data]`: derives for a type within a spec or status.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{
    Attribute, Field, Fields, Item, LitStr, Token, Type,
    parse::{Parse, ParseStream},
    parse_quote,
};

/// A check by the API server: a CEL expression and the sentence that it answers with.
pub struct Rule {
    pub expression: LitStr,
    pub sentence: LitStr,
}

impl Parse for Rule {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let expression = input.parse()?;
        input.parse::<Token![,]>()?;
        let sentence = input.parse()?;
        input.parse::<Option<Token![,]>>()?;
        Ok(Self { expression, sentence })
    }
}

pub fn expand(args: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    if !args.is_empty() {
        return Err(syn::Error::new_spanned(args, "#[data] takes no arguments"));
    }
    let mut item: Item = syn::parse2(item)?;
    match &mut item {
        Item::Struct(it) => {
            dress(&mut it.attrs, &mut it.fields, true)?;
        }
        Item::Enum(it) => {
            for variant in &mut it.variants {
                prepare(&mut variant.fields)?;
            }
            dress(&mut it.attrs, &mut Fields::Unit, false)?;
        }
        other => return Err(syn::Error::new_spanned(other, "#[data] goes on a struct or an enum")),
    }
    Ok(quote!(#item))
}

/// Adds the derives and prepares the fields.
pub fn dress(attrs: &mut Vec<Attribute>, fields: &mut Fields, camel_case: bool) -> syn::Result<()> {
    let renames = attrs.iter().any(|attr| names(attr, "rename_all"));
    let camel_case = (camel_case && !renames).then(|| quote!(, rename_all = "camelCase"));
    for attr in attrs.iter_mut() {
        off_wasm(attr);
    }
    let ours: [Attribute; 4] = [
        parse_quote!(#[derive(::berth_sdk::__private::serde::Serialize, ::berth_sdk::__private::serde::Deserialize, Clone, Debug, PartialEq)]),
        parse_quote!(#[serde(crate = "::berth_sdk::__private::serde" #camel_case)]),
        parse_quote!(#[cfg_attr(not(target_family = "wasm"), derive(::berth_sdk::__private::schemars::JsonSchema))]),
        parse_quote!(#[cfg_attr(not(target_family = "wasm"), schemars(crate = "::berth_sdk::__private::schemars"))]),
    ];
    attrs.splice(0..0, ours);
    prepare(fields)
}

/// Keeps what concerns the CRD away from wasm, and leaves absent options unwritten.
fn prepare(fields: &mut Fields) -> syn::Result<()> {
    for field in fields.iter_mut() {
        let mut rules = Vec::new();
        for attr in field.attrs.extract_if(.., |attr| attr.path().is_ident("rule")) {
            let Rule { expression, sentence } = attr.parse_args()?;
            rules.push(quote!({ "rule": #expression, "message": #sentence }));
        }
        field.attrs.iter_mut().for_each(off_wasm);
        if !rules.is_empty() {
            field.attrs.push(parse_quote!(#[cfg_attr(
                not(target_family = "wasm"),
                schemars(extend("x-kubernetes-validations" = ::berth_sdk::__private::serde_json::json!([#(#rules),*])))
            )]));
        }
        let untouched = !field.attrs.iter().any(|attr| names(attr, "skip_serializing_if"));
        if untouched && is(field, "Option") {
            field.attrs.push(parse_quote!(#[serde(skip_serializing_if = "Option::is_none")]));
        } else if untouched && is(field, "Conditions") {
            field.attrs.push(parse_quote!(#[serde(default, skip_serializing_if = "::berth_sdk::Conditions::is_empty")]));
        }
    }
    Ok(())
}

/// `#[schemars(…)]` is known to a derive that wasm does not have.
fn off_wasm(attr: &mut Attribute) {
    if attr.path().is_ident("schemars") {
        let meta = &attr.meta;
        *attr = parse_quote!(#[cfg_attr(not(target_family = "wasm"), #meta)]);
    }
}

/// Whether a `#[serde(…)]` has this word.
fn names(attr: &Attribute, word: &str) -> bool {
    let mut found = false;
    if attr.path().is_ident("serde") {
        // An attribute that does not parse is serde's to report.
        let _ = attr.parse_nested_meta(|meta| {
            found |= meta.path.is_ident(word);
            if meta.input.peek(Token![=]) {
                meta.value()?.parse::<syn::Expr>()?;
            } else if meta.input.peek(syn::token::Paren) {
                let inside;
                syn::parenthesized!(inside in meta.input);
                inside.parse::<TokenStream>()?;
            }
            Ok(())
        });
    }
    found
}

fn is(field: &Field, name: &str) -> bool {
    matches!(&field.ty, Type::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == name))
}

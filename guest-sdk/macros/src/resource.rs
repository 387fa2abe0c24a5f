//! `#[resource]`: a spec, and the type of its resource: kube's off wasm, a small one on wasm.

use proc_macro2::TokenStream;
use quote::{format_ident, quote};
use syn::{
    Ident, ItemStruct, LitStr, Path, Token, parenthesized,
    parse::{Parse, ParseStream},
    punctuated::Punctuated,
};

use crate::data::{Rule, dress};

#[derive(Default)]
struct Args {
    group: Option<LitStr>,
    version: Option<LitStr>,
    kind: Option<LitStr>,
    plural: Option<LitStr>,
    namespaced: bool,
    status: Option<Path>,
    shortnames: Vec<LitStr>,
    categories: Vec<LitStr>,
    columns: Vec<Vec<LitStr>>,
    rules: Vec<Rule>,
}

impl Parse for Args {
    fn parse(input: ParseStream<'_>) -> syn::Result<Self> {
        let mut args = Self::default();
        while !input.is_empty() {
            let name: Ident = input.parse()?;
            match name.to_string().as_str() {
                "namespaced" => args.namespaced = true,
                "column" => {
                    let inside;
                    parenthesized!(inside in input);
                    let column: Vec<LitStr> = Punctuated::<LitStr, Token![,]>::parse_terminated(&inside)?.into_iter().collect();
                    if !(2..=3).contains(&column.len()) {
                        return Err(syn::Error::new(
                            name.span(),
                            r#"a column is `column("NAME", ".status.field")`, with a type such as "integer" as the third"#,
                        ));
                    }
                    args.columns.push(column);
                }
                "rule" => {
                    let inside;
                    parenthesized!(inside in input);
                    args.rules.push(inside.parse()?);
                }
                word => {
                    input.parse::<Token![=]>()?;
                    match word {
                        "group" => args.group = Some(input.parse()?),
                        "version" => args.version = Some(input.parse()?),
                        "kind" => args.kind = Some(input.parse()?),
                        "plural" => args.plural = Some(input.parse()?),
                        "shortname" => args.shortnames.push(input.parse()?),
                        "category" => args.categories.push(input.parse()?),
                        "status" if input.peek(LitStr) => args.status = Some(input.parse::<LitStr>()?.parse()?),
                        "status" => args.status = Some(input.parse()?),
                        _ => {
                            return Err(syn::Error::new(
                                name.span(),
                                format!(
                                    "`{word}` is no argument of #[resource]: group, version, kind, plural, namespaced, status, shortname, category, column, rule"
                                ),
                            ));
                        }
                    }
                }
            }
            if !input.is_empty() {
                input.parse::<Token![,]>()?;
            }
        }
        Ok(args)
    }
}

pub fn expand(args: TokenStream, item: TokenStream) -> syn::Result<TokenStream> {
    let args: Args = syn::parse2(args)?;
    let mut spec: ItemStruct = syn::parse2(item)?;
    let missing = |what: &str| syn::Error::new_spanned(&spec.ident, format!("#[resource] needs `{what} = \"…\"`"));
    let group = args.group.clone().ok_or_else(|| missing("group"))?;
    let version = args.version.clone().ok_or_else(|| missing("version"))?;
    let kind = args.kind.clone().ok_or_else(|| missing("kind"))?;
    let plural = args.plural.clone().unwrap_or_else(|| LitStr::new(&plural(&kind.value()), kind.span()));
    let name = format_ident!("{}", kind.value(), span = kind.span());
    let kube = kube(&args, &group, &version, &kind, &plural)?;

    dress(&mut spec.attrs, &mut spec.fields, true)?;
    let (visibility, spec_name, namespaced) = (&spec.vis, &spec.ident, args.namespaced);
    let doc = format!("A `{}` with its metadata, spec and status.", kind.value());
    let (status, status_field, native_status, mark) = match &args.status {
        Some(status) => (
            quote!(#status),
            quote! {
                /// As it was when the run began.
                pub status: Option<#status>,
            },
            quote!(object.status = status;),
            quote! {
                impl ::berth_sdk::Status for #status {
                    type Of = #name;
                }
            },
        ),
        None => (quote!(()), quote!(), quote!(let _ = status;), quote!()),
    };
    let get_status = if args.status.is_some() { quote!(self.status.as_ref()) } else { quote!(None) };
    let wasm_status = if args.status.is_some() {
        quote!(Self { metadata, spec, status })
    } else {
        quote!({
            let _ = status;
            Self { metadata, spec }
        })
    };
    let rules = args.rules.iter().map(|Rule { expression, sentence }| quote!((#expression, #sentence)));

    Ok(quote! {
        #[cfg_attr(not(target_family = "wasm"), derive(::berth_sdk::__private::kube::CustomResource))]
        #kube
        #spec

        #[doc = #doc]
        #[cfg(target_family = "wasm")]
        #[derive(Clone, Debug, PartialEq)]
        #visibility struct #name {
            /// Name, namespace and the like.
            pub metadata: ::berth_sdk::Metadata,
            /// What is wanted.
            pub spec: #spec_name,
            #status_field
        }

        impl ::berth_sdk::Resource for #name {
            const KIND: ::berth_sdk::Kind =
                ::berth_sdk::Kind { group: #group, version: #version, kind: #kind, plural: #plural, namespaced: #namespaced };
            type Spec = #spec_name;
            type Status = #status;

            #[cfg(target_family = "wasm")]
            fn assemble(metadata: ::berth_sdk::Metadata, spec: #spec_name, status: Option<#status>) -> Self {
                #wasm_status
            }

            #[cfg(not(target_family = "wasm"))]
            fn assemble(metadata: ::berth_sdk::Metadata, spec: #spec_name, status: Option<#status>) -> Self {
                let mut object = Self::new("", spec);
                object.metadata = metadata;
                #native_status
                object
            }

            fn metadata(&self) -> &::berth_sdk::Metadata {
                &self.metadata
            }

            fn spec(&self) -> &#spec_name {
                &self.spec
            }

            fn status(&self) -> Option<&#status> {
                #get_status
            }
        }

        #[cfg(not(target_family = "wasm"))]
        impl ::berth_sdk::crd::Rules for #name {
            const RULES: &'static [(&'static str, &'static str)] = &[#(#rules),*];
        }

        #mark
    })
}

/// The `#[kube(…)]` for kube's derive.
fn kube(args: &Args, group: &LitStr, version: &LitStr, kind: &LitStr, plural: &LitStr) -> syn::Result<TokenStream> {
    let namespaced = args.namespaced.then(|| quote!(namespaced,));
    let status = args.status.as_ref().map(|status| {
        let status = LitStr::new(&quote!(#status).to_string(), kind.span());
        quote!(status = #status,)
    });
    let (shortnames, categories) = (&args.shortnames, &args.categories);
    let columns = args.columns.iter().map(|column| {
        let (name, path) = (&column[0], &column[1]);
        let text = LitStr::new("string", name.span());
        let type_ = column.get(2).unwrap_or(&text);
        quote!(printcolumn(name = #name, type_ = #type_, json_path = #path),)
    });
    let age =
        (!args.columns.is_empty()).then(|| quote!(printcolumn(name = "AGE", type_ = "date", json_path = ".metadata.creationTimestamp"),));
    Ok(quote! {
        #[cfg_attr(not(target_family = "wasm"), kube(
            group = #group, version = #version, kind = #kind, plural = #plural, #namespaced #status
            #(shortname = #shortnames,)* #(category = #categories,)* #(#columns)* #age
            derive = "PartialEq",
            crates(
                kube = "::berth_sdk::__private::kube",
                kube_core = "::berth_sdk::__private::kube::core",
                k8s_openapi = "::berth_sdk::__private::k8s_openapi",
                schemars = "::berth_sdk::__private::schemars",
                serde = "::berth_sdk::__private::serde",
                serde_json = "::berth_sdk::__private::serde_json",
            )
        ))]
    })
}

/// English, for the kinds that people make.
fn plural(kind: &str) -> String {
    let kind = kind.to_lowercase();
    match kind.as_bytes() {
        [.., b's' | b'x' | b'z'] | [.., b'c' | b's', b'h'] => kind + "es",
        [.., before, b'y'] if !b"aeiou".contains(before) => format!("{}ies", &kind[..kind.len() - 1]),
        _ => kind + "s",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_the_plural_that_people_expect() {
        for (kind, expected) in [
            ("ReportJob", "reportjobs"),
            ("Policy", "policies"),
            ("Gateway", "gateways"),
            ("Ingress", "ingresses"),
            ("Box", "boxes"),
            ("Branch", "branches"),
        ] {
            assert_eq!(plural(kind), expected);
        }
    }
}

//! The secrets of a control plane: its certificate authority, serving certificate, ServiceAccount keys, tokens and kubeconfig files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use k8s_openapi::ByteString;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::json;

/// What the API server is reached by.
const SERVED_NAMES: [&str; 4] = ["127.0.0.1", "localhost", "kubernetes.default.svc", "kubernetes"];

/// The files that kube-apiserver is started with, and what its clients need.
#[derive(Debug)]
pub struct Credentials {
    pub serving_certificate: PathBuf,
    pub serving_key: PathBuf,
    pub service_account_key: PathBuf,
    pub service_account_public_key: PathBuf,
    pub token_file: PathBuf,
    /// The authority's certificate in PEM.
    pub authority: String,
    /// The bearer token of a member of `system:masters`.
    pub admin_token: String,
}

impl Credentials {
    /// New ones, written to `directory`, which only its owner can read.
    pub fn create(directory: &Path) -> Result<Self> {
        let write = |name: &str, text: &str| -> Result<PathBuf> {
            let file = directory.join(name);
            std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
            Ok(file)
        };
        let authority = authority().context("cannot make a certificate authority")?;
        let (certificate, key) = serving(&authority).context("cannot make a serving certificate")?;
        let service_accounts = KeyPair::generate().context("cannot make a key for ServiceAccount tokens")?;
        let admin_token = format!("{:032x}", rand::random::<u128>());
        Ok(Self {
            serving_certificate: write("serving.crt", &certificate)?,
            serving_key: write("serving.key", &key)?,
            service_account_key: write("service-accounts.key", &service_accounts.serialize_pem())?,
            service_account_public_key: write("service-accounts.pub", &service_accounts.public_key_pem())?,
            token_file: write("tokens.csv", &format!("{admin_token},berth-admin,berth-admin,system:masters\n"))?,
            authority: authority.pem(),
            admin_token,
        })
    }
}

fn authority() -> Result<CertifiedIssuer<'static, KeyPair>, rcgen::Error> {
    let mut parameters = CertificateParams::default();
    parameters.distinguished_name.push(DnType::CommonName, "berth-controlplane");
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    CertifiedIssuer::self_signed(parameters, KeyPair::generate()?)
}

fn serving(authority: &CertifiedIssuer<'static, KeyPair>) -> Result<(String, String), rcgen::Error> {
    let mut parameters = CertificateParams::new(SERVED_NAMES.map(str::to_owned))?;
    parameters.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    parameters.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    parameters.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    Ok((parameters.signed_by(&key, authority)?.pem(), key.serialize_pem()))
}

/// A kubeconfig file's text: `server`, trusted by the `authority` certificate (PEM), as whom `token` says.
pub fn kubeconfig(server: &str, authority: &str, token: &str) -> String {
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "berth", "cluster": {"server": server, "certificate-authority-data": ByteString(authority.as_bytes().to_vec())}}],
        "users": [{"name": "berth", "user": {"token": token}}],
        "contexts": [{"name": "berth", "context": {"cluster": "berth", "user": "berth"}}],
        "current-context": "berth",
    });
    serde_saphyr::to_string(&kubeconfig).expect("a JSON value is valid YAML")
}

/// The client configuration that `kubeconfig` text describes. Retries are the caller's affair, with deadlines.
pub async fn client_config(kubeconfig: &str) -> Result<kube::Config> {
    let parsed = Kubeconfig::from_yaml(kubeconfig).context("the kubeconfig is not valid")?;
    let mut config =
        kube::Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await.context("the kubeconfig is not usable")?;
    config.default_retry = false;
    Ok(config)
}

//! The manifests of `deploy/`, which ride inside the program so that `berth dev` needs no checkout.

use anyhow::Result;

use super::Manifests;

macro_rules! files {
    ($($path:literal),* $(,)?) => { &[$(($path, include_str!(concat!("../../../", $path)))),*] };
}

const FILES: &[(&str, &str)] = files![
    "deploy/kustomization.yaml",
    "deploy/namespace.yaml",
    "deploy/crds/plugins.berth.acme.io.yaml",
    "deploy/crds/emailrequests.notify.acme.io.yaml",
    "deploy/crds/reportjobs.batch.acme.io.yaml",
    "deploy/rbac/host.yaml",
    "deploy/lease-traffic.yaml",
    "deploy/phase-label.yaml",
    "deploy/deployment.yaml",
    "deploy/service.yaml",
];

const PLUGIN_ROLES: &[(&str, &str)] = files!["deploy/plugins/rbac/email-request.yaml", "deploy/plugins/rbac/report-job.yaml"];

/// The kustomization in `deploy/`, and what the host may do for the two plugins; not the plugins themselves.
pub fn shipped() -> Result<Manifests> {
    let mut manifests = Manifests::embedded("deploy", FILES)?;
    for (path, text) in PLUGIN_ROLES {
        manifests.extend(Manifests::parse(path, text)?);
    }
    Ok(manifests)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn the_program_carries_every_file_of_the_checkout() {
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy");
        let mut expected = Manifests::read(&deploy).unwrap();
        expected.extend(Manifests::read(&deploy.join("plugins/rbac")).unwrap());
        let objects = |manifests: &Manifests| manifests.documents().iter().map(|document| document.object().clone()).collect::<Vec<_>>();
        assert_eq!(objects(&shipped().unwrap()), objects(&expected));
    }
}

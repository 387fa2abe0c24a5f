//! The plugin runtime: components compiled, described and run in sandboxes. The only part of the host that names wasmtime.
//!
//! # Expected flow
//! One [`Runtime`] a process. A loader calls [`Runtime::prepare`] for new bytes, and [`Prepared::handler`] for each configuration of
//! them; the controller calls the handler through [`Reconcile`].
//!
//! # Guarantees
//! A fresh store for every run: nothing outlives it, and nothing is shared. Every limit of [`limits`] holds, whatever the guest does,
//! and ends as a [`Failure`](crate::reconcile::Failure) with a sentence. A guest never holds a worker of tokio for longer than a
//! tick. No effect leaves after the fence of its run. Native code comes only from the host's own compiler.
//!
//! # Assumptions
//! Runs inside a tokio runtime of several threads with timers and I/O.

use std::{path::PathBuf, sync::Arc};

use anyhow::{Context, Result};
use wasmtime::Engine;

use self::{
    bindings::ReconcilerPre,
    cache::{Artefact, Cache},
    capability::{
        cluster::Reads,
        gate::{Gate, Rights},
        http::{Client, Grant, Outside, Ways},
        log::{Log, Speaker},
    },
    code::{Code, Codes},
    compile::{CompileError, Compiler},
    engine::Running,
    handler::Handler,
    instance::{Ended, Sandbox, State, too_long},
    limits::{HostLimits, Limits},
    shares::Shares,
};
use crate::{
    claim::Claim,
    metrics::Metrics,
    package::{Ceilings, Package, Refusal, reason},
    reconcile::Reconcile,
    secrets,
};

pub use self::capability::http::{InvalidResolve, Resolve};

#[allow(missing_docs, unsafe_code, clippy::all, reason = "generated")]
mod bindings;
#[cfg(test)]
mod boundary;
mod cache;
mod call;
mod capability;
mod claim;
mod code;
pub mod compile;
mod convert;
mod cores;
mod engine;
mod handler;
mod instance;
pub mod limits;
mod mapped;
mod meter;
mod shares;
mod text;
mod ticker;
mod world;

/// What the runtime needs to know.
#[derive(Clone)]
pub struct RuntimeConfig {
    /// The `berth` binary, whose hidden verb compiles.
    pub compiler: PathBuf,
    /// Where compiled components are kept; created, and private to this user.
    pub cache_dir: PathBuf,
    /// Names that lead to addresses of the operator's choice.
    pub resolve: Vec<Resolve>,
    /// Where the Secrets and ConfigMaps come from that `plugin.yaml` refers to.
    pub secrets: secrets::Read,
    /// Where denials are counted.
    pub metrics: Arc<Metrics>,
    /// What plugins may have at most.
    pub limits: HostLimits,
}

impl RuntimeConfig {
    /// With the defaults of [`limits`], and without a cluster.
    pub fn new(compiler: impl Into<PathBuf>, cache_dir: impl Into<PathBuf>) -> Self {
        Self {
            compiler: compiler.into(),
            cache_dir: cache_dir.into(),
            resolve: Vec::new(),
            secrets: secrets::nowhere(),
            metrics: Arc::default(),
            limits: HostLimits::default(),
        }
    }
}

/// One for the process.
pub struct Runtime {
    engine: Running,
    link: Arc<Link>,
    cache: Cache,
    codes: Codes<Linked>,
    compiler: Compiler,
    resolve: Arc<[Resolve]>,
    secrets: secrets::Read,
    metrics: Arc<Metrics>,
    ceilings: Ceilings,
    shares: Shares,
}

/// A component that passed every gate which needs only the component.
pub struct Prepared {
    /// What it is and asks for.
    pub claim: Arc<Claim>,
    code: Arc<Code<Linked>>,
    runtime: Arc<Runtime>,
}

impl Runtime {
    /// Sets up engine, ticker, cache and client.
    pub fn new(config: RuntimeConfig) -> Result<Arc<Self>> {
        let RuntimeConfig { compiler, cache_dir, resolve, secrets, metrics, limits } = config;
        let HostLimits { ceilings, compile, sandboxes, sandbox_memory, connections, stack } = limits;
        let engine = engine::for_running(sandboxes, stack)?;
        Ok(Arc::new(Self {
            link: link(&engine.engine)?,
            cache: Cache::open(cache_dir, &engine.engine)?,
            codes: Codes::new(),
            compiler: Compiler::new(compiler, compile),
            resolve: resolve.into(),
            secrets,
            metrics,
            ceilings,
            shares: Shares::new(sandboxes, sandbox_memory, connections),
            engine,
        }))
    }

    /// The gates in order: size, known world, compiled, linked, described, a valid claim.
    ///
    /// # Errors
    /// A [`Refusal`] of the component, or one of the reason `HostFailure` where the host is to blame and a later try may succeed.
    pub async fn prepare(self: &Arc<Self>, package: &Package) -> Result<Prepared, Refusal> {
        self.ceilings.check_component(package)?;
        world::check(&package.component)?;
        let code = self.compiled(package).await?;
        let linked = self.codes.look(&code).await.map_err(|error| match error.downcast::<Unlinked>() {
            Ok(Unlinked(causes)) => {
                Refusal::new(reason::UNKNOWN_WORLD, format!("It does not fit this host's version of the contract: {causes}."))
            }
            Err(error) => Refusal::new(reason::HOST_FAILURE, format!("The host cannot load its code: {error:#}.")),
        })?;
        let claim = self.describe(package, &linked).await?;
        claim::check(&claim)?;
        Ok(Prepared { claim: Arc::new(claim), code, runtime: self.clone() })
    }

    /// From the cache, or by the compiler.
    async fn compiled(self: &Arc<Self>, package: &Package) -> Result<Arc<Code<Linked>>, Refusal> {
        let failed = |error: anyhow::Error| Refusal::new(reason::HOST_FAILURE, format!("The host cannot compile it: {error:#}."));
        if let Some(code) = self.cached(package).await {
            return Ok(code);
        }
        let _turn = self.compiler.turn().await;
        // Somebody else may have compiled it while this one waited.
        if let Some(code) = self.cached(package).await {
            return Ok(code);
        }
        let written = self.cache.unfinished();
        let began = tokio::time::Instant::now();
        let memory = self.shares.memory_for_compiling(self.compiler.memory()).await;
        self.compiler.compile(&package.component, written.path()).await.map_err(|error| match error {
            CompileError::Component(sentence) => Refusal::new(reason::COMPILE_FAILED, sentence),
            CompileError::Host(..) | CompileError::Killed => failed(error.into()),
        })?;
        drop(memory);
        let runtime = self.clone();
        let digest = package.digest;
        let stored = tokio::task::spawn_blocking(move || runtime.cache.store(&digest, written)).await;
        stored.map_err(Into::into).flatten().map_err(failed)?;
        tracing::info!(plugin = %package.name, digest = %package.digest.short(), elapsed = ?began.elapsed(), "compiled a plugin");
        match self.load(package).await {
            Ok(Some(code)) => Ok(code),
            Ok(None) => Err(failed(anyhow::anyhow!("what was just compiled is not in the plugin cache any more"))),
            Err(error) => Err(unfit(&error).unwrap_or_else(|| failed(error))),
        }
    }

    async fn cached(self: &Arc<Self>, package: &Package) -> Option<Arc<Code<Linked>>> {
        self.load(package).await.unwrap_or_else(|error| {
            tracing::warn!(plugin = %package.name, error = format!("{error:#}"), "refused a file of the plugin cache");
            None
        })
    }

    /// The code of a component that is in the cache and can be mapped.
    async fn load(self: &Arc<Self>, package: &Package) -> anyhow::Result<Option<Arc<Code<Linked>>>> {
        let (runtime, digest) = (self.clone(), package.digest);
        let artefact = tokio::task::spawn_blocking(move || runtime.cache.load(&digest)).await??;
        let Some(artefact) = artefact else { return Ok(None) };
        let link = self.link.clone();
        let code = self.codes.add(move || link(&artefact));
        match self.codes.look(&code).await {
            // What it lacks is not that of the cache.
            Err(error) if !error.is::<Unlinked>() => {
                self.cache.remove(&digest);
                Err(error)
            }
            _ => Ok(Some(code)),
        }
    }

    /// Asks a trial instance for its claim, without any capability.
    async fn describe(&self, package: &Package, component: &Linked) -> Result<Claim, Refusal> {
        let failed = |failure: String| Refusal::new(reason::TRIAL_FAILED, format!("Its `describe` failed in a trial: {failure}."));
        let admitted = self.shares.of(&package.name).admit(Limits::TRIAL.memory).await;
        let speaker = Speaker { plugin: package.name.as_str().into(), digest: package.digest.short().into(), object: "describe".into() };
        let gate = Gate::new(Log::new(speaker, Limits::TRIAL), None);
        let (sandbox, component) = (Sandbox::new(&self.engine, Limits::TRIAL, gate, None, Reads::new(None)), component.clone());
        let call = sandbox.run(&self.engine, admitted, |store| {
            Box::pin(async move {
                let instance = component.instantiate_async(&mut *store).await?;
                instance.berth_plugin_handler().call_describe(store).await
            })
        });
        match tokio::time::timeout(Limits::TRIAL.timeout, call).await {
            Ok(Ended::Returned(claim, _)) => Ok(convert::claim(claim)),
            Ok(Ended::Failed(failure)) => Err(failed(failure.to_string())),
            Err(_) => Err(failed(too_long(&Limits::TRIAL).to_string())),
        }
    }
}

/// A component that can be instantiated.
type Linked = ReconcilerPre<State>;

/// Maps and links.
type Link = dyn Fn(&Artefact) -> Result<Linked> + Send + Sync;

/// How the code of components is mapped and linked.
fn link(engine: &Engine) -> Result<Arc<Link>> {
    let linker = instance::linker(engine).map_err(anyhow::Error::from).context("cannot link the host's functions")?;
    let engine = engine.clone();
    Ok(Arc::new(move |artefact: &Artefact| {
        let component = artefact.map(&engine)?;
        let linked = linker.instantiate_pre(&component).and_then(ReconcilerPre::new);
        linked.map_err(|error| {
            let causes = error.chain().map(ToString::to_string).collect::<Vec<_>>().join(": ");
            Unlinked(text::one_line(&causes)).into()
        })
    }))
}

/// A component that asks for what this host does not have, by its causes.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Unlinked(String);

/// Why a component that can be compiled does not fit into a sandbox: wasmtime finds that out when it maps it, by the shape of the pool.
fn unfit(error: &anyhow::Error) -> Option<Refusal> {
    let cause = error.root_cause().to_string();
    let sentence =
        || format!("It does not fit into a sandbox: {} (fixed).", crate::text::cut(&text::one_line(&cause), limits::SENTENCE / 2));
    cause.contains("exceeds the").then(|| Refusal::new(reason::COMPILE_FAILED, sentence()))
}

impl Prepared {
    /// The handler under a configuration. `package` is the one that was prepared, or one with the same component.
    ///
    /// # Errors
    /// A setting that the claim needs is missing or is no URL, or the configuration asks for more than the host gives.
    pub fn handler(&self, package: &Package) -> Result<Arc<dyn Reconcile>, Refusal> {
        let Runtime { resolve, shares, secrets, metrics, ceilings, .. } = &*self.runtime;
        ceilings.check(&package.config)?;
        let limits = Limits::of(&package.config);
        let share = shares.of(&package.name);
        share.check_memory(limits.memory).map_err(|most| {
            let sentence = format!("plugin.yaml asks for more \"memory\" than the {most} that is half of `--sandbox-memory` of berth run.");
            Refusal::new(reason::INVALID_CONFIG, sentence)
        })?;
        let web = Client::new(Ways { resolve: resolve.clone(), share: share.clone(), connect: limits.run.http_connect });
        let outside = Outside { plugin: package.name.as_str().into(), web: Arc::new(web), read: secrets.clone() };
        let grant = Grant::new(&self.claim.hosts, &package.config, &outside)?;
        for host in grant.missing() {
            tracing::warn!(plugin = %package.name, %host, "the claim asks for a host that `allowedHosts` does not give");
        }
        Ok(Arc::new(Handler {
            runtime: self.runtime.clone(),
            code: self.code.clone(),
            claim: self.claim.clone(),
            plugin: outside.plugin,
            share,
            digest: package.digest.short().into(),
            settings: serde_json::to_string(&package.config.settings).expect("a map of JSON values is JSON"),
            rights: Rights { grant: Arc::new(grant), metrics: metrics.clone(), kind: self.claim.reconciles.group_kind() },
            limits,
        }))
    }
}

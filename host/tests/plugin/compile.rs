//! Compilation: once, in bounds, and never from a file that is not ours.

use std::{
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use berth_host::{
    package::reason,
    plugin::{Runtime, RuntimeConfig, limits::HostLimits},
};

use crate::bench::*;

/// As few sandboxes as these tests need.
fn few() -> HostLimits {
    HostLimits { sandboxes: 8, ..HostLimits::default() }
}

fn artefact(directory: &std::path::Path) -> PathBuf {
    let mut files = fs::read_dir(directory).expect("a cache").map(|entry| entry.expect("readable").path());
    files.find(|path| path.extension().is_some_and(|extension| extension == "artefact")).expect("an artefact")
}

#[tokio::test]
async fn the_same_bytes_compile_once_and_damaged_artefacts_are_refused() {
    let events = Events::record();
    let directory = tempfile::tempdir().expect("a directory");
    let config = RuntimeConfig { limits: few(), ..RuntimeConfig::new(BERTH, directory.path().join("cache")) };
    let cache = config.cache_dir.clone();
    let package = package(relabelled(probe(), "once"), "");
    let compiled = || events.messages().iter().filter(|message| *message == "compiled a plugin").count();

    let runtime = Runtime::new(config.clone()).expect("a runtime");
    let (first, second) = tokio::join!(runtime.prepare(&package), runtime.prepare(&package));
    assert!(first.is_ok() && second.is_ok());
    assert_eq!(compiled(), 1);
    drop((first, second, runtime));

    let runtime = Runtime::new(config.clone()).expect("a runtime");
    runtime.prepare(&package).await.expect("accepted");
    assert_eq!(compiled(), 1, "the next process maps what this one compiled");

    let path = artefact(&cache);
    let mut bytes = fs::read(&path).expect("readable");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    // A new file, as the old one is mapped.
    fs::remove_file(&path).expect("mine");
    fs::write(&path, bytes).expect("writable");
    runtime.prepare(&package).await.expect("compiled again");
    assert_eq!(compiled(), 2);
    assert!(events.messages().iter().any(|message| message.contains("refused a file of the plugin cache")), "{:?}", events.messages());

    fs::remove_file(artefact(&cache).with_extension("sha256")).expect("mine");
    runtime.prepare(&package).await.expect("compiled again");
    assert_eq!(compiled(), 3);
}

#[tokio::test]
async fn a_component_that_is_too_much_work_is_refused_within_the_bounds() {
    let directory = tempfile::tempdir().expect("a directory");
    let cases: [(fn(&mut RuntimeConfig), _, _); 4] = [
        (|config| config.limits.compile.cpu = Duration::from_secs(1), 300_000, "more than 1s of CPU (`--compile-cpu`"),
        (|config| config.limits.compile.memory = 160 << 20, 300_000, "needs more than 160Mi of memory (`--compile-memory`"),
        (|config| config.limits.compile.wall = Duration::from_millis(300), 300_000, "took more than 300ms (`--compile-time`"),
        (|config| config.limits.compile.size = 64 << 10, 10, "makes more than 64Ki of machine code (`--compile-size`"),
    ];
    for (set, blocks, words) in cases {
        let package = package(with_heavy_module(probe(), blocks), "");
        let mut config = RuntimeConfig { limits: few(), ..RuntimeConfig::new(BERTH, directory.path().join("cache")) };
        set(&mut config);
        let began = Instant::now();
        let runtime = Runtime::new(config).expect("a runtime");
        let refusal = runtime.prepare(&package).await.err().expect("refused");
        assert_eq!(refusal.reason, reason::COMPILE_FAILED, "{refusal}");
        assert!(refusal.message.contains(words), "{refusal}");
        assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    }
    assert_eq!(fs::read_dir(directory.path().join("cache")).expect("a cache").count(), 0, "nothing is left behind");
}

#[tokio::test]
async fn a_component_that_does_not_validate_is_refused_with_the_reason() {
    // A function that has to return a number and returns nothing.
    let sections = [section(1, &[1, 0x60, 0, 1, 0x7f]), section(3, &[1, 0]), section(10, &[1, 2, 0, 0x0b])].concat();
    let broken = [probe(), &section(1, &[b"\0asm\x01\0\0\0", sections.as_slice()].concat())].concat();
    let refusal = refusal(&broken).await;
    assert_eq!(refusal.reason, reason::COMPILE_FAILED);
    assert!(refusal.message.starts_with("It cannot be compiled: "), "{refusal}");
}

#[tokio::test]
async fn a_missing_compiler_is_the_hosts_fault() {
    let directory = tempfile::tempdir().expect("a directory");
    let config = RuntimeConfig { limits: few(), ..RuntimeConfig::new("/nonexistent/berth", directory.path().join("cache")) };
    let refusal = Runtime::new(config).expect("a runtime").prepare(&package(probe(), "")).await.err().expect("refused");
    assert_eq!(refusal.reason, reason::HOST_FAILURE);
    assert!(refusal.message.contains("/nonexistent/berth"), "{refusal}");
}

#[tokio::test]
async fn a_compiler_that_is_killed_is_the_hosts_fault() {
    let directory = tempfile::tempdir().expect("a directory");
    let cache = directory.path().join("cache");
    let config = RuntimeConfig { limits: few(), ..RuntimeConfig::new(BERTH, cache.clone()) };
    let runtime = Runtime::new(config).expect("a runtime");
    let package = package(with_heavy_module(probe(), 300_000), "");
    let prepared = tokio::select! {
        prepared = runtime.prepare(&package) => prepared,
        never = kill_compilers_of(&cache) => match never {},
    };
    let refusal = prepared.err().expect("refused");
    assert_eq!(refusal.reason, reason::HOST_FAILURE, "{refusal}");
    assert!(refusal.message.contains("ended from outside"), "{refusal}");
}

/// Kills each child that writes into this cache, as the kernel would where memory is short.
async fn kill_compilers_of(cache: &std::path::Path) -> std::convert::Infallible {
    let wanted = cache.display().to_string();
    loop {
        let processes = fs::read_dir("/proc").expect("Linux").flatten().filter_map(|entry| {
            let process = entry.file_name().to_str()?.parse::<u32>().ok()?;
            let line = fs::read(entry.path().join("cmdline")).ok()?;
            let line = String::from_utf8_lossy(&line).into_owned();
            (line.contains(berth_host::plugin::compile::VERB) && line.contains(&wanted)).then_some(process)
        });
        for process in processes {
            // One that has just ended by itself cannot be killed any more.
            let _ = std::process::Command::new("kill").args(["-KILL", &process.to_string()]).status();
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_table_or_memories_beyond_the_limit_are_the_components_fault() {
    for (module, words) in [
        // A table of 40,000 functions, and three memories.
        (section(4, &[vec![1, 0x70, 0], encoded(&40_000_usize)].concat()), "table"),
        (section(5, &[3, 0, 1, 0, 1, 0, 1]), "memor"),
    ] {
        let refusal = refusal(&with_instance(probe(), &module)).await;
        assert_ne!(refusal.reason, reason::HOST_FAILURE, "{refusal}");
        assert!(refusal.message.contains(words), "{refusal}");
    }
}

/// The probe with a core module of these sections that is instantiated too.
fn with_instance(component: &[u8], sections: &[u8]) -> Vec<u8> {
    use wasmparser::{Parser, Payload};
    let mut depth = 0_usize;
    let mut modules = 0_usize;
    for payload in Parser::new(0).parse_all(component) {
        match payload.expect("a component") {
            Payload::ModuleSection { .. } => {
                modules += usize::from(depth == 0);
                depth += 1;
            }
            Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    let module = [b"\0asm\x01\0\0\0", sections].concat();
    let instance = [vec![1, 0], encoded(&modules), vec![0]].concat();
    [component.to_vec(), section(1, &module), section(2, &instance)].concat()
}

/// The probe beside a core module of one function with a great many blocks.
fn with_heavy_module(component: &[u8], blocks: usize) -> Vec<u8> {
    // block; local.get 0; br_if 0; local.get 0; i32.const 7; i32.mul; local.set 0; end
    let block = [0x02, 0x40, 0x20, 0, 0x0d, 0, 0x20, 0, 0x41, 7, 0x6c, 0x21, 0, 0x0b];
    let body: Vec<u8> = [vec![0], block.repeat(blocks), vec![0x20, 0, 0x0b]].concat();
    let code = [vec![1], encoded(&body[..])].concat();
    let module = [b"\0asm\x01\0\0\0".to_vec(), section(1, &[1, 0x60, 1, 0x7f, 1, 0x7f]), section(3, &[1, 0]), section(10, &code)].concat();
    [component.to_vec(), section(1, &module)].concat()
}

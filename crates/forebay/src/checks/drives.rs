//! The drives of the machine, by reading: one after another, then all at once.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::env::{Env, spawn_thread};
use drive::ReadBench;
use wire::cluster::Finding;

use super::{per_second, problem, shown, unknown, warning, well};
use crate::node::{LocalDrives, NodeDir, read_proc};

/// How long large and small reads of a drive are measured, and of all at once; less if there are many. All large reads and all
/// small ones take at most so long together.
const LARGE: Duration = Duration::from_millis(400);
const SMALL: Duration = Duration::from_millis(200);
const TOGETHER: Duration = Duration::from_millis(800);
const ALL: Duration = Duration::from_secs(8);
/// A drive this much slower than the median of all is named, in percent; and drives that are this slow together.
const SLOW_PERCENT: u64 = 50;
const TOGETHER_PERCENT: u64 = 60;

/// What was found, and the bytes per second that all drives read at once, if that was measured.
pub(super) fn look(env: &Env, dir: &NodeDir) -> (Vec<Finding>, Option<u64>) {
    let paths = match LocalDrives::load(env, dir, Vec::new()) {
        Ok(drives) => drives.paths(),
        Err(error) => return (vec![unknown("drives", format!("no drives are known: {error:#}"))], None),
    };
    let share = ALL / u32::try_from(paths.len().max(1)).unwrap_or(u32::MAX);
    let (large, small) = (LARGE.min(share), SMALL.min(share));
    let mut findings = Vec::new();
    let mut measured = Vec::new();
    for path in paths {
        findings.extend(link(&path));
        match alone(env, &path, large, small) {
            Ok(Some((bench, alone, latency))) => measured.push((path, bench, alone, latency)),
            Ok(None) => findings.push(unknown(
                "drive",
                format!("{} holds too little to measure how fast it reads", path.display()),
            )),
            Err(error) => findings.push(problem(
                "drive",
                format!("{} cannot be read: {error}", path.display()),
                "its data is rebuilt from other drives, if these suffice",
                "look at the device and its cable (dmesg), and see `forebay drive list`",
            )),
        }
    }
    let alone: Vec<u64> = measured.iter().map(|(_, _, alone, _)| *alone).collect();
    for (path, _, bytes_per_s, latency) in &measured {
        findings.push(one(path, *bytes_per_s, *latency, &alone));
    }
    if measured.len() < 2 {
        return (findings, alone.first().copied());
    }
    let readers: Vec<_> = measured
        .into_iter()
        .map(|(_, bench, ..)| spawn_thread("read-bench", move || bench.large(TOGETHER)))
        .collect();
    let read: Option<Vec<u64>> = readers.into_iter().map(|reader| reader.join().ok()?.ok()).collect();
    let together = read.map(|read| read.iter().sum());
    findings.push(match together {
        Some(together) => all_at_once(together, &alone),
        None => unknown("drives", "the drives could not be read at once"),
    });
    (findings, together)
}

type Alone = (Arc<ReadBench>, u64, Duration);

fn alone(env: &Env, path: &Path, large: Duration, small: Duration) -> std::io::Result<Option<Alone>> {
    let Some(bench) = ReadBench::open(env, path)?.map(Arc::new) else { return Ok(None) };
    let (bytes_per_s, latency) = (bench.large(large)?, bench.small(small)?);
    Ok(Some((bench, bytes_per_s, latency)))
}

fn one(path: &Path, bytes_per_s: u64, latency: Duration, all: &[u64]) -> Finding {
    let read =
        format!("{} reads {}, and 4 KiB in {}", path.display(), per_second(bytes_per_s), shown(latency));
    let mut sorted = all.to_vec();
    sorted.sort_unstable();
    let usual = sorted[sorted.len() / 2];
    if bytes_per_s * 100 >= usual * SLOW_PERCENT {
        return well("drive", read);
    }
    let found = format!("{read}, where others read {}", per_second(usual));
    let cost = "each stripe is as slow as its slowest drive";
    warning(
        "drive",
        found,
        cost,
        "look at its health (smartctl -a), its temperature and its slot; replace it if it stays slow",
    )
}

fn all_at_once(together: u64, alone: &[u64]) -> Finding {
    let sum: u64 = alone.iter().sum();
    let found = format!(
        "{} drives read {} at once, where the sum of each alone is {}",
        alone.len(),
        per_second(together),
        per_second(sum)
    );
    if together * 100 >= sum * TOGETHER_PERCENT {
        return well("drives", found);
    }
    let cost = "more drives on that way give no more speed";
    let advice =
        "see what they share: a controller, PCIe lanes, one device below several files, or too few cores";
    warning("drives", found, cost, advice)
}

/// The width of the PCIe link of a device, if it is narrower than it could be.
fn link(path: &Path) -> Option<Finding> {
    let device = std::path::absolute(path).ok()?;
    let name = device.file_name()?.to_str()?.to_owned();
    // The device may be a partition.
    let of = |name: &str| PathBuf::from(format!("/sys/class/block/{name}/device/device"));
    let whole = name.rsplit_once('p').map_or(name.as_str(), |(whole, _)| whole).to_owned();
    let width = |file: &str| {
        [&name, &whole]
            .into_iter()
            .find_map(|name| read_proc(&of(name).join(file)).ok()?.trim().parse::<u32>().ok())
    };
    let (now, most) = (width("current_link_width")?, width("max_link_width")?);
    (device.starts_with("/dev") && now < most).then(|| {
        warning(
            "pcie",
            format!("{} has {now} of {most} PCIe lanes", path.display()),
            "it reads and writes that much slower",
            "seat it anew, or move it to another slot",
        )
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use base::DriveUuid;
    use base::env::{Caching, OpenMode};
    use base::units::MIB;
    use wire::cluster::Grade;

    use super::*;

    #[test]
    fn a_slow_drive_and_a_shared_way_are_named() {
        let grade = |bytes_per_s, all: &[u64]| one(Path::new("/dev/x"), bytes_per_s, SMALL, all).grade;
        assert_eq!(grade(500, &[500]), Grade::Ok);
        assert_eq!(grade(500, &[1000, 1000, 500]), Grade::Ok);
        assert_eq!(grade(499, &[1000, 499, 1000]), Grade::Warning);
        assert_eq!(all_at_once(1800, &[1000, 2000]).grade, Grade::Ok);
        assert_eq!(all_at_once(1799, &[1000, 2000]).grade, Grade::Warning);
    }

    #[test]
    fn drives_of_a_directory_are_read_and_missing_ones_named() {
        let root = tempfile::tempdir().unwrap();
        let (env, dir) = (Env::real(), NodeDir::new(root.path()));
        let path = |name: &str| root.path().join(name);
        for name in ["one", "two", "small"] {
            let file = env.files.open(&path(name), OpenMode::CreateNew, Caching::Buffered).unwrap();
            let mib = if name == "small" { 1 } else { 64 };
            file.write_at(&vec![1; mib * MIB as usize], 0).unwrap();
            file.sync_data().unwrap();
        }
        let places = ["one", "two", "small", "gone"].iter().zip(1..);
        let places = places.map(|(name, number)| (DriveUuid([number; 16]), path(name)));
        LocalDrives::load(&env, &dir, Vec::new()).unwrap().set(places).unwrap();
        let (findings, together) = look(&env, &dir);
        let of = |name: &str| {
            let named = findings.iter().find(|it| it.found.contains(path(name).to_str().unwrap()));
            named.map(|finding| finding.grade)
        };
        assert!(of("one").unwrap() != Grade::Problem && of("two").unwrap() != Grade::Problem, "{findings:?}");
        assert_eq!((of("small"), of("gone")), (Some(Grade::Unknown), Some(Grade::Problem)));
        assert!(together.unwrap() > 0);
        assert_eq!(findings.last().unwrap().code, "drives");
    }
}

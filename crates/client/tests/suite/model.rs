//! Random operations on one file by one or several clients, against a vector of bytes.

use crate::common::{create, pattern, read_in_parts, run};
use base::env::Random;
use base::env::sim::SimRandom;
use base::{FsError, Ino};
use client::{AllocateMode, Client, OpenIntent, SeekKind, SetAttr};

/// Files stay below this.
const SIZE_MAX: u64 = 6 << 20;

struct Run {
    seed: u64,
    random: SimRandom,
    clients: Vec<Client>,
    ino: Ino,
    model: Vec<u8>,
}

impl Run {
    fn below(&self, limit: u64) -> u64 {
        self.random.next_u64() % limit.max(1)
    }

    fn client(&self) -> &Client {
        &self.clients[self.below(self.clients.len() as u64) as usize]
    }

    /// Offsets near each other, at block boundaries, or anywhere.
    fn off(&self) -> u64 {
        match self.below(4) {
            0 => self.below(100),
            1 => self.below(20) * 4096,
            2 => self.below(300_000),
            _ => self.below(SIZE_MAX - (2 << 20)),
        }
    }

    fn len(&self) -> u64 {
        match self.below(8) {
            0..3 => 1 + self.below(100),
            3..5 => 1 + self.below(10_000),
            5 => 4096 * (1 + self.below(4)),
            6 => 1 + self.below(300_000),
            _ => 1 + self.below(2 << 20),
        }
    }

    fn fill(&mut self, off: u64, bytes: &[u8]) {
        let end = off as usize + bytes.len();
        self.model.resize(self.model.len().max(end), 0);
        self.model[off as usize..end].copy_from_slice(bytes);
    }

    async fn step(&mut self) {
        let (off, len) = (self.off(), self.len());
        let size = self.model.len() as u64;
        let ino = self.ino;
        match self.below(20) {
            0..8 => {
                let bytes = pattern(self.below(1000), len as usize);
                self.client().write(ino, off, &bytes).await.unwrap();
                self.fill(off, &bytes);
            }
            8 => {
                let set = SetAttr { size: Some(off), ..SetAttr::default() };
                let attr = self.client().setattr(ino, set).await.unwrap();
                assert_eq!(attr.size, off, "seed={}", self.seed);
                self.model.resize(off as usize, 0);
            }
            9 => {
                self.client().allocate(ino, off, len, AllocateMode::Punch).await.unwrap();
                let (from, to) = (off.min(size), (off + len).min(size));
                self.model[from as usize..to as usize].fill(0);
            }
            10 => {
                self.client().allocate(ino, off, len, AllocateMode::Zero).await.unwrap();
                self.fill(off, &vec![0; len as usize]);
            }
            11 => self.copy(off, self.off(), len).await,
            12 => self.seek(off).await,
            13 => self.client().fsync(ino).await.unwrap(),
            14 => assert_eq!(self.client().getattr(ino).await.unwrap().size, size, "seed={}", self.seed),
            _ => {
                let bytes = self.client().read(ino, off, len as usize).await.unwrap();
                let (from, to) = (off.min(size), (off + len).min(size));
                assert!(bytes == self.model[from as usize..to as usize], "seed={} {off}+{len}", self.seed);
            }
        }
    }

    async fn copy(&mut self, from: u64, to: u64, len: u64) {
        let size = self.model.len() as u64;
        let taken = len.min(size.saturating_sub(from));
        let copied = self.client().copy_range((self.ino, from), (self.ino, to), len).await;
        if taken > 0 && from < to + taken && to < from + taken {
            assert_eq!(copied, Err(FsError::Invalid), "seed={}", self.seed);
            return;
        }
        assert_eq!(copied, Ok(taken), "seed={}", self.seed);
        if taken > 0 {
            let bytes = self.model[from as usize..(from + taken) as usize].to_vec();
            self.fill(to, &bytes);
        }
    }

    /// Data may be zeros; a hole is always zeros.
    async fn seek(&mut self, off: u64) {
        let size = self.model.len() as u64;
        let hole = self.client().seek(self.ino, off, SeekKind::Hole).await;
        let data = self.client().seek(self.ino, off, SeekKind::Data).await;
        if off >= size {
            assert_eq!(
                (hole, data),
                (Err(FsError::NoAttribute), Err(FsError::NoAttribute)),
                "seed={}",
                self.seed
            );
            return;
        }
        let hole = hole.unwrap();
        let is_aligned = |at: u64| at == off || at.is_multiple_of(4096);
        assert!(hole == size || is_aligned(hole), "seed={} hole={hole}", self.seed);
        assert!(data.is_err() || data.is_ok_and(is_aligned), "seed={} data={data:?}", self.seed);
        let block = &self.model[hole as usize..(hole - hole % 4096 + 4096).clamp(hole, size) as usize];
        assert!(block.iter().all(|byte| *byte == 0), "seed={} hole={hole}", self.seed);
        assert!((off..=size).contains(&hole), "seed={}", self.seed);
        assert!(hole == size || self.model[hole as usize] == 0, "seed={} hole={hole}", self.seed);
        let zeros_to = data.unwrap_or(size);
        let skipped = &self.model[off as usize..zeros_to as usize];
        assert!(skipped.iter().all(|byte| *byte == 0), "seed={} data={data:?}", self.seed);
    }

    async fn check(&self) {
        for client in &self.clients {
            let part = [1 << 20, 100_000, 8 << 20][self.below(3) as usize];
            let found = read_in_parts(client, self.ino, part).await.unwrap();
            assert_eq!(found.len(), self.model.len(), "seed={}", self.seed);
            let differs = found.iter().zip(&self.model).position(|(one, other)| one != other);
            assert_eq!(differs, None, "seed={}", self.seed);
        }
    }
}

fn random_operations(profile: &str, clients: usize, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        run(profile, |world| async move {
            let mut all = Vec::new();
            for _ in 0..clients {
                all.push(world.client().await);
            }
            let ino = create(&all[0], "file").await;
            for client in &all[1..] {
                client.open_file(ino, OpenIntent::Write).await.unwrap();
            }
            let mut run = Run { seed, random: SimRandom::new(seed), clients: all, ino, model: Vec::new() };
            for step in 0..150 {
                run.step().await;
                if step % 40 == 0 {
                    run.check().await;
                }
            }
            run.check().await;
            for client in &run.clients {
                client.close().await.unwrap();
            }
            run.clients = vec![world.client().await];
            run.check().await;
        });
    }
}

#[test]
fn one_client_reads_its_own_writes() {
    random_operations("4+2", 1, 0..15);
}

#[test]
fn one_client_on_one_drive_reads_its_own_writes() {
    random_operations("1+0", 1, 100..110);
}

#[test]
fn several_clients_read_each_others_writes() {
    random_operations("4+2", 3, 200..215);
}

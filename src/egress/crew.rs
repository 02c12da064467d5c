//! Who does what of a pool's threads. No CUDA here: loom explores it.
//!
//! The threads are alike. At most one of them *leads*: it asks for what is under way. What it finds is consumed by whoever is free, itself
//! included, so that an item which comes alone is consumed where it was found, without another thread having to wake up. There is one
//! thread more than may consume at a time: somebody can always lead.
//!
//! Invariants: what arrives is handed out exactly once, in order; while something is under way or may be consumed, some thread that is not
//! consuming is awake or has been woken, unless all that may consume do; at the end what is left is handed out, and then every
//! thread ends.
#![deny(unsafe_code)]

use std::time::Duration;

use crate::order::{Order, Sorter};
use crate::sync::{AtomicU64, Condvar, Mutex, Ordering};

/// What `leader` says: nobody leads; it asks; it sleeps between two questions.
const NOBODY: u64 = 0;
const ASKS: u64 = 1;
const RESTS: u64 = 2;

#[derive(Debug)]
pub(super) struct Crew<I> {
    state: Mutex<State<I>>,
    /// Items that are being submitted or under way.
    flying: AtomicU64,
    /// Goes up with each of those.
    news: AtomicU64,
    /// Whether somebody asks. Who launches an item looks here after having counted it, and who stops asking looks at the count after having
    /// said so here: one of them sees the other.
    leader: AtomicU64,
    /// Not 0: nothing will be under way any more.
    closed: AtomicU64,
    /// Not 0: there is something to consume, and nobody for it but who leads.
    called: AtomicU64,
    /// For threads that have nothing to do.
    work: Condvar,
    /// For the leader, which rests between two questions.
    woken: Condvar,
    /// How many consume at a time.
    most: usize,
    /// Who leads does not rest, and leads on where nothing is under way.
    pub(super) awake: bool,
}

#[derive(Debug)]
struct State<I> {
    ready: Sorter<I>,
    threads: usize,
    consuming: usize,
    leading: bool,
    resting: bool,
    /// Threads asleep that nobody has woken, and those that were woken and sleep yet.
    asleep: usize,
    woken: usize,
}

/// What a thread is to do.
#[derive(Debug)]
pub(super) enum Task<I> {
    Consume(I),
    Lead,
    End,
}

/// What a thread did before.
#[derive(Debug)]
pub(super) enum Done<'a, I> {
    /// It begins.
    Nothing,
    Consumed,
    /// It led, and found these.
    Led(&'a mut Vec<(u64, I)>),
}

impl<I> Crew<I> {
    pub(super) fn new(order: Order, most: usize, awake: bool) -> Self {
        let state = State {
            ready: Sorter::new(order),
            threads: 0,
            consuming: 0,
            leading: false,
            resting: false,
            asleep: 0,
            woken: 0,
        };
        Self {
            state: Mutex::new(state),
            flying: AtomicU64::new(0),
            news: AtomicU64::new(0),
            leader: AtomicU64::new(NOBODY),
            closed: AtomicU64::new(0),
            called: AtomicU64::new(0),
            work: Condvar::new(),
            woken: Condvar::new(),
            most: most.max(1),
            awake,
        }
    }

    /// Blocks for something to do.
    pub(super) fn next(&self, done: Done<'_, I>) -> Task<I> {
        let mut state = self.state.lock();
        match done {
            Done::Nothing => state.threads += 1,
            Done::Consumed => state.consuming -= 1,
            Done::Led(found) => {
                state.leading = false;
                self.called.store(0, Ordering::SeqCst);
                self.leader.store(NOBODY, Ordering::SeqCst);
                self.flying.fetch_sub(found.len() as u64, Ordering::SeqCst);
                for (number, item) in found.drain(..) {
                    state.ready.put(number, item);
                }
            }
        }
        loop {
            if state.consuming < self.most
                && let Some((_, item)) = state.ready.take()
            {
                state.consuming += 1;
                self.hand_on(&mut state);
                return Task::Consume(item);
            }
            if !state.leading && self.to_lead() {
                state.leading = true;
                self.leader.store(ASKS, Ordering::SeqCst);
                return Task::Lead;
            }
            if self.is_closed() {
                return Task::End;
            }
            state.asleep += 1;
            while state.woken == 0 {
                self.work.wait(&mut state);
            }
            state.woken -= 1;
        }
    }

    /// Whether a thread that has nothing else to do is to lead.
    fn to_lead(&self) -> bool {
        self.is_flying() || self.awake && !self.is_closed()
    }

    /// Wakes another thread if there is something to do for it and nobody about to.
    fn hand_on(&self, state: &mut State<I>) {
        // (An awake pool's leader that consumes leads on when it has; it need wake nobody to do that meanwhile.)
        let work = state.consuming < self.most && state.ready.has_next() || !state.leading && self.is_flying();
        let about = state.threads - state.asleep - state.consuming - usize::from(state.leading);
        if !work || about > 0 {
            return;
        }
        if state.asleep > 0 {
            state.asleep -= 1;
            state.woken += 1;
            self.work.notify_one();
        } else if state.leading {
            self.called.store(1, Ordering::SeqCst);
            self.rouse(state);
        }
    }

    /// Ends the leader's rest.
    fn rouse(&self, state: &mut State<I>) {
        if state.resting {
            state.resting = false;
            self.woken.notify_one();
        }
    }

    /// An item is about to be submitted, so that who is to ask for it wakes up meanwhile. Whether that one, being awake, can as well submit
    /// it; what comes alone to an awake pool is there sooner if nobody else has to see it first.
    pub(super) fn launch(&self) -> bool {
        let alone = self.flying.fetch_add(1, Ordering::SeqCst) == 0;
        self.news.fetch_add(1, Ordering::SeqCst);
        if self.leader.load(Ordering::SeqCst) == ASKS {
            return !(self.awake && alone);
        }
        let mut state = self.state.lock();
        self.rouse(&mut state);
        self.hand_on(&mut state);
        false
    }

    /// It is submitted, and will be found. Who was woken may have found nothing before, and rest again; who has yet to wake up will look.
    pub(super) fn launched(&self) {
        self.news.fetch_add(1, Ordering::SeqCst);
        if self.leader.load(Ordering::SeqCst) == RESTS {
            self.rouse(&mut self.state.lock());
        }
    }

    /// An item that was to be submitted was not, or not to be asked for.
    pub(super) fn withdraw(&self) {
        self.flying.fetch_sub(1, Ordering::SeqCst);
    }

    /// An item that was not asked for has come.
    pub(super) fn arrived(&self, number: u64, item: I) {
        let mut state = self.state.lock();
        state.ready.put(number, item);
        self.hand_on(&mut state);
    }

    /// Whether anything is being submitted or under way.
    pub(super) fn is_flying(&self) -> bool {
        self.flying.load(Ordering::SeqCst) > 0
    }

    /// For the leader, before it asks.
    pub(super) fn news(&self) -> u64 {
        self.news.load(Ordering::SeqCst)
    }

    /// For the leader: whether it is to stop, since it is needed to consume.
    pub(super) fn is_called(&self) -> bool {
        self.called.load(Ordering::SeqCst) != 0
    }

    /// For the leader: sleeps for `pause` at most, and not at all if there is news since `seen`.
    pub(super) fn rest(&self, seen: u64, pause: Duration) {
        let mut state = self.state.lock();
        self.leader.store(RESTS, Ordering::SeqCst);
        if self.news() == seen && !self.is_closed() && !self.is_called() {
            state.resting = true;
            self.woken.wait_for(&mut state, pause);
            state.resting = false;
        }
        self.leader.store(ASKS, Ordering::SeqCst);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst) != 0
    }

    /// Nothing more will be under way.
    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        self.closed.store(1, Ordering::SeqCst);
        state.woken += std::mem::take(&mut state.asleep);
        drop(state);
        self.work.notify_all();
        self.woken.notify_all();
    }

    /// How many have come and were not handed out.
    #[cfg(all(test, transfer_tensor_loom))]
    fn len(&self) -> usize {
        self.state.lock().ready.len()
    }
}

#[cfg(all(test, not(transfer_tensor_loom)))]
mod tests {
    use super::*;

    /// Who submits to an awake crew what comes alone does so himself, and leaves more to who asks; of another crew all is left to who asks.
    #[test]
    fn what_comes_alone_to_an_awake_crew_is_not_left_to_it() {
        for awake in [true, false] {
            let crew = Crew::<u64>::new(Order::Completion, 1, awake);
            crew.flying.fetch_add(u64::from(!awake), Ordering::SeqCst);
            assert!(matches!(crew.next(Done::Nothing), Task::Lead));
            assert_eq!([crew.launch(), crew.launch()], [!awake, true]);
        }
    }
}

#[cfg(all(test, transfer_tensor_loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    /// What flies: pushed by who submits, taken by who leads.
    type Sky = Arc<Mutex<Vec<(u64, u64)>>>;

    fn model(check: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(check);
    }

    /// As a pool's thread does it; what it consumed.
    fn work(crew: &Crew<u64>, sky: &Sky) -> Vec<u64> {
        let (mut consumed, mut found) = (Vec::new(), Vec::new());
        let mut task = crew.next(Done::Nothing);
        loop {
            task = match task {
                Task::Consume(item) => {
                    consumed.push(item);
                    crew.next(Done::Consumed)
                }
                Task::Lead => {
                    let on = || crew.is_flying() || crew.awake && !crew.is_closed();
                    while found.is_empty() && on() && !crew.is_called() {
                        let seen = crew.news();
                        found.append(&mut sky.lock());
                        match crew.awake {
                            true => thread::yield_now(),
                            false if found.is_empty() => crew.rest(seen, Duration::ZERO),
                            false => {}
                        }
                    }
                    crew.next(Done::Led(&mut found))
                }
                Task::End => return consumed,
            };
        }
    }

    fn submit(crew: &Crew<u64>, sky: &Sky, number: u64) {
        crew.launch();
        sky.lock().push((number, number));
        crew.launched();
    }

    #[test]
    fn each_item_is_consumed_once_and_then_there_is_an_end() {
        for order in [Order::Completion, Order::Submission] {
            model(move || {
                let (crew, sky) = (Arc::new(Crew::new(order, 1, false)), Sky::default());
                let threads: Vec<_> = (0..2)
                    .map(|_| {
                        let (crew, sky) = (crew.clone(), sky.clone());
                        thread::spawn(move || work(&crew, &sky))
                    })
                    .collect();
                submit(&crew, &sky, 1);
                crew.arrived(0, 0);
                submit(&crew, &sky, 2);
                // As a pool does, which waits until all is delivered.
                while crew.is_flying() || crew.len() > 0 {
                    thread::yield_now();
                }
                crew.close();
                let mut all: Vec<u64> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
                all.sort_unstable();
                assert_eq!(all, [0, 1, 2]);
            });
        }
    }

    /// One thread, which asks for what does not come before something else was consumed.
    #[test]
    fn who_leads_alone_consumes_what_arrives() {
        model(|| {
            let (crew, sky) = (Arc::new(Crew::new(Order::Completion, 1, false)), Sky::default());
            let (other, others) = (crew.clone(), sky.clone());
            let thread = thread::spawn(move || work(&other, &others));
            crew.launch();
            crew.arrived(0, 0);
            while crew.len() > 0 {
                thread::yield_now();
            }
            sky.lock().push((1, 1));
            while crew.is_flying() || crew.len() > 0 {
                thread::yield_now();
            }
            crew.close();
            assert_eq!(thread.join().unwrap(), [0, 1]);
        });
    }

    /// Who leads an awake crew consumes without waking anybody, unless more is under way.
    #[test]
    fn an_awake_crew_consumes_each_item_once() {
        model(|| {
            let (crew, sky) = (Arc::new(Crew::new(Order::Completion, 1, true)), Sky::default());
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let (crew, sky) = (crew.clone(), sky.clone());
                    thread::spawn(move || work(&crew, &sky))
                })
                .collect();
            submit(&crew, &sky, 0);
            submit(&crew, &sky, 1);
            while crew.is_flying() || crew.len() > 0 {
                thread::yield_now();
            }
            crew.close();
            let mut all: Vec<u64> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }

    #[test]
    fn what_was_withdrawn_keeps_nobody() {
        model(|| {
            let (crew, sky) = (Arc::new(Crew::new(Order::Completion, 1, false)), Sky::default());
            let (other, others) = (crew.clone(), sky.clone());
            let thread = thread::spawn(move || work(&other, &others));
            crew.launch();
            crew.withdraw();
            crew.close();
            assert!(thread.join().unwrap().is_empty());
        });
    }
}
